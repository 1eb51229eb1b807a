"""Mismatch: how far two of the three policies of a run are from each other, on the tokens that were sampled."""

from collections.abc import Set
from typing import Literal

import torch
from torch import Tensor

from rlstab import About, Mean, NoOpAt, Pool, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.surrogate import MAX_LOG_RATIO
from rlstab.errors import OutOfRange
from rlstab.kl_estimators import k1, k3


class Mismatch(TokenObjective):
    """Report how far apart two policies are, by their log-probs of the sampled tokens; change nothing.

    Problem:
        Three policies should be close to each other, but this is rarely checked: the sampler, the old policy that the
        ratio divides by, and the policy at the start of the optimizer step. A gap between sampler and trainer is
        reported to precede a collapse, and so is a fall in the effective sample size. These numbers cost next to
        nothing.

    Equation:
        With d_t = log-prob of the token under ``of`` - log-prob under ``to``, D_i its sum and n_i the number of tokens
        of response i, and S the number of responses that have a token:

            k1                = mean of -d_t                     over tokens: estimates KL(to || of)
            k3                = mean of e^d - d - 1              over tokens: the same, never negative
            chi2              = mean of e^2d - 1                 over tokens: the variance of the ratio
            ess               = (sum_i e^D)^2 / (S sum_i e^2D)   effective sample size, a share in [1 / S, 1]
            log_ppl_diff      = mean of -D_i / n_i               over responses: ln perplexity of one less the other
            max_abs_log_ratio = max of |d_t|                     over tokens, nats

        All are of the whole optimizer step. Where ``to`` is the policy that sampled, k1, k3 and chi2 have no bias.

    Reads:
        - ``old_logprobs`` (n,), nats: where one of the two is this.
        - ``logprobs`` (n,), nats: likewise.
        - ``rollout_logprobs`` (n,), nats: likewise.
        - ``sequence`` (n,), integers: the response of each token.
        - ``sequence_ids`` (S,), integers: their number.

    Writes:
        nothing. It only reports.

    Denominator:
        untouched: every token is counted, whatever masks drop.

    Parameters:
        - ``of``: 'old_logprobs' | 'logprobs', default 'old_logprobs'. The policy that is compared. As in verl's
          metrics.
        - ``to``: 'rollout_logprobs' | 'old_logprobs', default 'rollout_logprobs'. What it is compared with. As there.

    State:
        none

    Deviations:
        - From verl: sums are over the optimizer step; there over the rollout, before it is split into mini-batches.
          Perplexities are compared by their logarithm; there also as a ratio. The effective sample size is that of
          weights of responses, neither clamped nor truncated: the largest is divided out before the exponential, so
          none overflows. There it is that of the truncated weights of all tokens.
        - From verl: d is clamped to 20 nats in k3 too, there only in chi2.
        - From TRL: it reports mean and largest absolute difference per token, and the ratios that it corrects by.

    Pitfalls:
        The effective sample size is that of whole responses. Random gaps of 0.02 nats on each of 4000 tokens reduce it
        to 0.2, and no other number shows them. k1 may be negative by chance. List the method twice for two pairs of
        policies: their metrics are then under ``mismatch_1`` and ``mismatch_2``, in the order in which a printed
        composition shows them.

    Interacts:
        - ``mismatch`` measures what ``importance_correction`` corrects.

    Example:
        Two responses of two tokens; the trainer finds one token half as likely as the sampler said, and one twice. The
        responses weigh 1 / 2 and 2: (2.5)^2 / (2 * 4.25) = 0.7353 of them count.

        >>> import torch
        >>> from rlstab import Mismatch, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.2, 0.5], [0.4, 0.1]], dtype=torch.float64).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2),
        ...     advantages=torch.tensor([1.0, -1.0]),
        ...     old_logprobs=old,
        ...     rollout_logprobs=torch.tensor([[0.4, 0.5], [0.2, 0.1]], dtype=torch.float64).log(),
        ... )
        >>> out = compose(Mismatch())(batch, PolicyOutputs.from_padded(batch, logprobs=old.clone().requires_grad_()))
        >>> for name, value in out.metrics().items():
        ...     if name.startswith("mismatch/"):
        ...         print(name.removeprefix("mismatch/"), round(value, 4) + 0.0)
        k1 0.0
        k3 0.125
        chi2 0.5625
        log_ppl_diff 0.0
        ess 0.7353
        max_abs_log_ratio 0.6931

    Source:
        J. Schulman, "Approximating KL Divergence", 2020 (the estimators); L. J. Huang et al., "Stable Asynchrony:
        Variance-Controlled Off-Policy RL for LLMs", 2026, arXiv 2602.17616 (the effective sample size as a warning).
        Common code: verl-project/verl ``verl/trainer/ppo/rollout_corr_helper.py`` (``compute_offpolicy_metrics``).
    """

    about = About(
        addresses={"off-policy"},
        no_op_at=(NoOpAt({}, "It only reports."),),
    )

    name = "mismatch"

    of: Literal["old_logprobs", "logprobs"] = "old_logprobs"
    to: Literal["rollout_logprobs", "old_logprobs"] = "rollout_logprobs"

    def __post_init__(self) -> None:
        if self.of == self.to:
            raise OutOfRange(f"'{self.name}': of and to are both '{self.of}', expected two policies.")

    @property
    def needs(self) -> Set[str]:
        return {self.of, self.to}

    def measure(self, batch: TokenBatch) -> Stat:
        gap = self._gap(batch)
        largest = Pool.largest(batch.sequence_total(gap), 1, batch.lengths > 0)
        return {"log_weight": largest, "gap": Pool.largest(gap.abs().topk(min(1, len(gap))).values, 1)}

    def measure_again(self, batch: TokenBatch, stat: Settled) -> Stat:
        largest = stat.threshold("log_weight").value or 0.0
        weight = (batch.sequence_total(self._gap(batch)) - largest).exp()
        return {"weight": Mean.of(weight, batch.lengths > 0), "square": Mean.of(weight.square(), batch.lengths > 0)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        gap = self._gap(batch)
        size = stat.mean("weight").value ** 2 / stat.mean("square").value if len(batch) else 0.0
        report = {
            "k1": Mean.of(k1(gap)),
            "k3": Mean.of(k3(gap)),
            "chi2": Mean.of((2 * gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).expm1()),
            "log_ppl_diff": Mean.of(-batch.sequence_mean(gap), batch.lengths > 0),
            "ess": Mean.scalar(size) if len(batch) else Mean.of(torch.zeros(0)),
            "max_abs_log_ratio": stat.threshold("gap").report(),
        }
        return Terms(report=report)

    def _gap(self, batch: TokenBatch) -> Tensor:
        """``(n,)`` float64 log-ratio of the two policies."""
        return torch.sub(getattr(batch, self.of).double(), getattr(batch, self.to).double())
