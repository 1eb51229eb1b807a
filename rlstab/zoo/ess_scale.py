"""ESS scale: a smaller learning rate where few responses carry the whole importance weight (VCPO)."""

from collections.abc import Set
from typing import Annotated, Literal

from torch import Tensor

from rlstab import About, Mean, NoOpAt, Pool, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective


class ESSScale(TokenObjective):
    """Scale the learning rate of an optimizer step by the effective sample size of its responses (VCPO).

    Problem:
        The staler the sampling policy, the heavier the tail of the importance weights of whole responses: a few
        responses carry the step, and its gradient has the variance of a sample of that size. The step should shrink
        with that sample. The authors report that the effective sample size falls before a collapse, and that training
        is stable at a lag of 128 steps.

    Equation:
        With D_i the sum over response i of ``logprobs`` - ``rollout_logprobs``, and S the number of responses:

            ess      = (sum_i e^D)^2 / (S sum_i e^2D)                    a share in [1 / S, 1]
            lr_scale = min(1, ess / b)^p

        b is ``base``, p ``power``. With ``anchor="old"`` D is of ``old_logprobs``. The largest weight is divided out
        before the exponential, which leaves ess as it is; so no weight overflows.

    Reads:
        - ``logprobs`` (n,), nats: policy at the start of the optimizer step.
        - ``rollout_logprobs`` (n,), nats: as the sampler reported them; with ``anchor="rollout"``.
        - ``old_logprobs`` (n,), nats: with ``anchor="old"``.
        - ``sequence`` (n,), integers: the response of each token.
        - ``sequence_ids`` (S,), integers: their number.

    Writes:
        - ``lr_scale``: Multiply the learning rate by ess / ``base`` to the power of ``power``, at most 1, where ess is
          the effective sample size of the responses of the optimizer step, weighed by their ratios to the ``anchor``
          policy.

    Denominator:
        untouched: the loss and its gradient are as without it.

    Parameters:
        - ``base`` (b): float in (0, 1], default 1.0. The share from which on nothing is scaled. The authors' scripts
          for mathematics; for tool use over several turns 0.55, which they measured on-policy.
        - ``power`` (p): float in [0, inf), default 0.5. The authors' rule "sqrt", for AdamW; 1 is their rule "linear".
        - ``anchor``: 'rollout' | 'old', default 'rollout'. Which policy sampled. The authors: what the engine reported.

    State:
        none

    Deviations:
        - From its code: weights are those of the policy at the start of the optimizer step; in the code, those of the
          old policy, recomputed for each batch, which is the same at one optimizer step per batch. It adds 1e-8 to the
          sum of squares and exponentiates without a shift, so that e^D may overflow. Weights truncated at 8, its
          ``use_clipped``, off in all scripts, are not offered.
        - From its code: an optimizer step without responses has the scale 1; there 0.
        - From the paper: its other half, a baseline by the gradient norm of each response, is not part of this.

    Pitfalls:
        To log what it would do and change nothing, write ``observe(ESSScale())``: ``observe_ess_scale/ess`` and
        ``observe_ess_scale/would_scale_lr``. The scale may be as small as (1 / (b S))^p. Scaling the loss instead would
        do nothing: Adam divides it out again, and so does a clip of the gradient norm. Log-ratios add up over a
        response: random gaps of 0.02 nats on each of 4000 tokens, which are harmless otherwise, give an ess of 0.2.
        That is what ``base`` is for. In the later optimizer steps of a rollout the evidence is
        that of the first, unless the run has ``refresh: step``.

    Interacts:
        - ``ess_scale`` was published with ``importance_correction`` at level 'sequence', truncated at 8.
        - ``ess_scale`` acts on the effective sample size that ``mismatch`` reports.

    Limits:
        - An optimizer step whose effective sample size is at least ``base``.

    Example:
        Four responses, of which the third became eight times as likely: (1 + 1 + 8 + 1)^2 / (4 * 67) = 0.4515, and the
        learning rate is multiplied by its root. If it is only observed, the rate stays.

        >>> import torch
        >>> from rlstab import ESSScale, PolicyOutputs, TokenBatch, compose, observe
        >>> now = torch.tensor([[0.5], [0.5], [0.8], [0.5]], dtype=torch.float64).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(4, 1),
        ...     advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        ...     old_logprobs=now,
        ...     rollout_logprobs=torch.tensor([[0.5], [0.5], [0.1], [0.5]], dtype=torch.float64).log(),
        ... )
        >>> for method, name in ((ESSScale(), "ess_scale"), (observe(ESSScale()), "observe_ess_scale")):
        ...     objective = compose(method)
        ...     policy = PolicyOutputs.from_padded(batch, logprobs=now.clone().requires_grad_())
        ...     out = objective(batch, policy, state=objective.init_state())
        ...     print(round(out.lr_scale, 4), round(out.metrics()[f"{name}/ess"], 4))
        0.6719 0.4515
        1.0 0.4515

    Source:
        L. J. Huang et al., "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", 2026, arXiv 2602.17616.
        Reference code: mit-han-lab/vcpo ``verl/workers/actor/megatron_actor.py``,
        ``recipe/fully_async_policy/staleness_utils.py`` (``compute_ess_info``, ``compute_global_ess_ratio``).
    """

    about = About(
        addresses={"off-policy"},
        no_op_at=(NoOpAt({"power": 0.0}, "the scale is 1."),),
    )

    name = "ess_scale"
    writes = {"lr_scale"}

    base: Annotated[float, Range(gt=0, le=1)] = 1.0
    power: Annotated[float, Range(ge=0)] = 0.5
    anchor: Literal["rollout", "old"] = "rollout"

    @property
    def needs(self) -> Set[str]:
        return {"logprobs", f"{self.anchor}_logprobs"}

    def measure(self, batch: TokenBatch) -> Stat:
        return {"log_weight": Pool.largest(self._log_weights(batch), 1, batch.lengths > 0)}

    def measure_again(self, batch: TokenBatch, stat: Settled) -> Stat:
        weight = (self._log_weights(batch) - (stat.threshold("log_weight").value or 0.0)).exp()
        return {"weight": Mean.of(weight, batch.lengths > 0), "square": Mean.of(weight.square(), batch.lengths > 0)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        weight, square = stat.mean("weight"), stat.mean("square")
        if not float(weight.count):
            return Terms(lr_scale=1.0)
        ess = weight.value**2 / square.value
        scale = min(1.0, ess / self.base) ** self.power
        return Terms(lr_scale=scale, report={"ess": Mean.scalar(ess), "lr_scale": Mean.scalar(scale)})

    def _log_weights(self, batch: TokenBatch) -> Tensor:
        """``(S,)`` float64 log of the importance weight of each response."""
        return batch.sequence_total(batch.logprobs.double() - batch.signal(f"{self.anchor}_logprobs").double())
