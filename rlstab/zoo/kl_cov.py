"""KL-Cov: hold the tokens that drive entropy down the most."""

from typing import Annotated

from torch import Tensor

from rlstab import Mean, Penalty, PolicyOutputs, Pool, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.metadata import About, NoOpAt
from rlstab.core.surrogate import token_log_ratio
from rlstab.zoo.covariant import Covariant


class KLCov(Covariant, TokenObjective):
    """Penalise the drift of the few tokens whose log-prob and advantage covary the most.

    Problem:
        Entropy falls where probable tokens are rewarded and improbable ones punished. To first order, its change is
        minus the covariance of log-prob and advantage, and the paper finds that very few tokens account for most of it:
        their covariance is hundreds of times the mean. Keeping only those close to the old policy keeps entropy up and
        leaves the others unconstrained.

    Equation:
        With lp_t = ``logprobs``, A_t = ``advantages``, means over all tokens of the optimizer step, N of them:

            cov_t = (A_t - mean A) (lp_t - mean lp)
            sel_t = cov_t among the largest k,   k = max(1, floor(rho N))
            L     = policy term + beta sum_t c0_t sel_t |ln r_t|

        rho is ``share``, beta ``coefficient``, r_t the ratio of the token, live over old. c0_t are the coefficients of
        the aggregation over all tokens: 1 / N for a token mean. The factor on the gradient of a log-prob is then r A,
        and r A - beta sign(ln r) on the selected tokens.

    Reads:
        - ``logprobs`` (n,), nats: policy at the start of the optimizer step.
        - ``advantages`` (n,), unitless: with their size, before any bonus.
        - ``old_logprobs`` (n,), nats: the policy that the ratio divides by.
        - live ``logprobs`` (n,), nats, with gradient.

    Writes:
        - ``penalties``: Add ``coefficient`` times the size of the log-ratio on the share ``share`` of the tokens of the
          optimizer step (rounded down, at least one) whose log-prob and advantage have the largest covariance.

    Denominator:
        untouched: the penalty is divided by the counts of all tokens, as the policy term is.

    Parameters:
        - ``share`` (rho): float in (0, 1], default 0.002. Official scripts: 0.002 for 7B, 0.0002 for 32B, written there
          as the percentages 0.2 and 0.02.
        - ``coefficient`` (beta): float in [0, inf), default 1.0. Official code. In verl the configuration has 0.1 by
          default.

    State:
        none

    Deviations:
        - From the paper: it writes a KL divergence from the old policy. What its code computes, and what is computed
          here, is |ln r| of the sampled token: not an unbiased estimate, and a pull of constant size towards the old
          policy.
        - From its code, and from verl and SkyRL: means, count and largest values are those of each micro-batch of one
          device there, at least one token in each, so that small micro-batches hold more tokens than ``share`` says.
          Here they are exact over all parts and ranks.
        - From its code: covariances are those of the live policy, which is the policy at the start of the optimizer
          step where evidence is recomputed for each.
        - From its code: every token that ties with the smallest selected one is selected too; there ``topk`` breaks
          ties arbitrarily.

    Pitfalls:
        With one optimizer step per rollout it does nothing: every ratio is 1, where |ln r| has no slope. The published
        loss has no clip at all. ``coefficient`` is meant for advantages divided by their standard deviation, about 1 in
        size: against those of Dr. GRPO, below 1, the penalty outweighs the pull of nearly every token that it selects.

    Interacts:
        - ``kl_cov`` was published on ``token_mean``.
        - ``kl_cov`` was published without a clip. ``clip_higher`` and ``dcpo_clip`` also stop tokens that ``kl_cov``
          leaves free; where they stop a token that ``kl_cov`` holds, only the pull back is left.
        - A token that a mask drops keeps the penalty of ``kl_cov``, and counts in its means and its share.

    Limits:
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        A correct response with tokens of probability 0.9 and 0.1, and a wrong one with 0.8 and 0.2. Their covariances
        are 0.95, -1.24, -0.84 and 0.55; a share of a quarter is the first. Its ratio is 0.95 / 0.9, so its gradient is
        (-1.0556 + 1) / 4.

        >>> import torch
        >>> from rlstab import KLCov, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.9, 0.1], [0.8, 0.2]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = torch.tensor([[0.95, 0.1], [0.8, 0.2]]).log().requires_grad_()
        >>> out = compose(KLCov(share=0.25))(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> [round(g, 4) for g in live.grad.flatten().tolist()]
        [-0.0139, -0.25, 0.25, 0.25]
        >>> round(out.metrics()["kl_cov/threshold"], 2)
        0.95

    Source:
        G. Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", 2025,
        arXiv 2505.22617. Reference code: PRIME-RL/Entropy-Mechanism-of-RL ``verl/trainer/ppo/core_algos.py``
        (``compute_policy_loss_kl_cov``), ``recipe/dapo/7b_kl_cov.sh``.
    """

    about = About(
        addresses={"exploration"},
        no_op_at=(NoOpAt({"coefficient": 0.0}, "only the penalty acts, and its coefficient is 0."),),
    )

    name = "kl_cov"
    writes = {"penalties"}
    reads_drift = {"live"}  # its penalty makes the ratio itself

    share: Annotated[float, Range(gt=0, le=1)] = 2e-3
    coefficient: Annotated[float, Range(ge=0)] = 1.0

    def measure_again(self, batch: TokenBatch, stat: Settled) -> Stat:
        return {"covariance": Pool.top(self.covariances(batch, stat), self.share, rounding="floor")}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        threshold = stat.threshold("covariance")
        selected = threshold.reached(self.covariances(batch, stat))

        def drift(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            return token_log_ratio(policy, anchor, batch).abs()

        report = {"threshold": threshold.report(), "selected": Mean.of(selected)}
        return Terms(penalties={"": Penalty(self.coefficient, drift, selected)}, report=report)
