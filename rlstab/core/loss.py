"""The one place where terms become a loss.

::

    L = sum_i c_i  * keep_i * weight_i * surrogate(policy, anchor, ratio, A_i + bonus_i, bounds_i, exempt_i)
      + sum_k coef_k * sum_i c0_i * where_ki * fn_k(policy, anchor)_i

``c`` comes from the counts of kept tokens, ``c0`` from those of all tokens, both over the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstab.core.batch import PolicyOutputs, TokenBatch
from rlstab.core.errors import ShapeError
from rlstab.core.stats import Mean
from rlstab.core.terms import Aggregate, Bounds, Terms, Totals

#: Log-ratios are clamped to this many nats before ``exp``; outside the gradient is zero.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The loss of one part of the step.

    Attributes:
        loss: scalar; sums over parts and ranks to the whole-batch loss.
        report: metrics as mergeable summaries.
        nonfinite: int64 scalar, how many tokens had a live value that was NaN or Inf (they make the loss NaN).
    """

    loss: Tensor
    report: Mapping[str, Mean]
    nonfinite: Tensor

    def metrics(self) -> dict[str, float]:
        """The report as numbers, without what nothing was counted for."""
        return {name: one.value for name, one in self.report.items() if float(one.count)}


def token_log_ratio(policy: PolicyOutputs, anchor: PolicyOutputs, batch: TokenBatch) -> Tensor:
    """``(n,)`` default of the ratio slot: one ratio a token."""
    return policy.logprobs - (anchor.logprobs if batch.live_ratio else batch.old_logprobs)


def clipped_surrogate(
    policy: PolicyOutputs,
    anchor: PolicyOutputs,
    ratio: Tensor,
    advantages: Tensor,
    bounds: Bounds | None,
    exempt: Tensor | None,
) -> Tensor:
    """``(n,)`` default of the surrogate slot: the clipped ratio times the advantage, negated.

    ``max(-A r, -A clip(r, 1 - low, 1 + high))`` (arXiv 1707.06347 eq. 7), for A < 0 at most ``-A dual``
    (arXiv 1912.09729 eq. 7), written as one clamp a sign. Without bounds it is ``-A r``.
    """
    if bounds is None:
        return -advantages * ratio
    rising = torch.clamp(ratio, max=1 + bounds.high)
    falling = torch.clamp(ratio, min=1 - bounds.low)
    if bounds.dual is not None:
        falling = torch.clamp(falling, max=bounds.dual)
    inside = torch.where(advantages >= 0, rising, falling)
    return -advantages * (inside if exempt is None else torch.where(exempt, ratio, inside))


def token_mean(sequence: Tensor, counted: Tensor, num_sequences: int, totals: Totals) -> Tensor:
    """``(n,)`` default of the aggregate slot: every counted token weighs ``1 / N``."""
    return torch.full_like(counted, 1.0 / totals.tokens, dtype=torch.float64)


def counts(batch: TokenBatch, where: Tensor | None) -> tuple[int, int]:
    """Tokens of a part that count, and sequences with at least one such token."""
    counted = batch.sequence if where is None else batch.sequence[where]
    seen = torch.zeros(batch.num_sequences, dtype=torch.bool, device=counted.device)
    seen[counted] = True
    return counted.numel(), int(seen.sum())


def pulling(terms: Terms, batch: TokenBatch) -> Tensor:
    """``(n,)`` bool, the tokens whose surrogate can have a gradient: kept, weight and advantage not zero."""
    pull = (batch.advantages if terms.bonus is None else batch.advantages + terms.bonus) != 0
    if terms.weight is not None:
        pull = pull & (terms.weight != 0)
    return pull if terms.keep is None else pull & terms.keep


def loss_of_part(
    terms: Terms,
    batch: TokenBatch,
    policy: PolicyOutputs,
    anchor: PolicyOutputs,
    kept: Totals,
    everything: Totals,
) -> LossOutput:
    """The loss of one part, from the merged terms and the counts of the whole step.

    Args:
        terms: merged over all methods.
        batch: the evidence that they were made from.
        policy: live outputs for its tokens.
        anchor: their values as constants.
        kept: counts over kept tokens, the denominators of the policy term.
        everything: counts over all tokens, the denominators of penalties.

    Raises:
        ShapeError: batch and policy disagree in their number of tokens.
    """
    if policy.logprobs.shape != batch.old_logprobs.shape:
        raise ShapeError(
            f"the policy has {policy.logprobs.numel()} log-probs for a batch of {len(batch)} tokens. Build it with "
            f"PolicyOutputs.from_padded(batch, ...) from the same rows."
        )
    aggregate = terms.aggregate or token_mean
    present = torch.ones_like(batch.sequence, dtype=torch.bool)
    keep = present if terms.keep is None else terms.keep

    log_ratio = (terms.ratio or token_log_ratio)(policy, anchor, batch)
    log_ratio = torch.where(keep, log_ratio, torch.zeros_like(log_ratio)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = batch.advantages if terms.bonus is None else batch.advantages + terms.bonus
    surrogate = (terms.surrogate or clipped_surrogate)(policy, anchor, ratio, advantages, terms.bounds, terms.exempt)
    if terms.weight is not None:
        surrogate = surrogate * terms.weight
    surrogate = torch.where(keep, surrogate, torch.zeros_like(surrogate))

    loss = _weighted(surrogate, aggregate, batch, keep, kept)
    report = dict(terms.report)
    penalised: Tensor | None = None
    for name, penalty in terms.penalties.items():
        value = penalty.fn(policy, anchor)
        if penalty.where is not None:
            value = torch.where(penalty.where, value, torch.zeros_like(value))
        report[f"{name}/value"] = Mean.of(value, penalty.where)
        penalised = penalty.coefficient * value if penalised is None else penalised + penalty.coefficient * value
    finite = torch.isfinite(policy.logprobs)
    if penalised is not None:
        loss = loss + _weighted(penalised, aggregate, batch, present, everything)
        finite = finite & torch.isfinite(penalised)

    report |= _ratio_report(ratio.detach(), advantages, keep, pulling(terms, batch), terms)
    report["tokens/kept"] = Mean.of(keep)
    if batch.entropies is not None:
        report["tokens/entropy"] = Mean.of(batch.entropies)
    nonfinite = (~finite).sum()
    # clamping would hide a NaN or Inf log-prob behind a finite loss
    loss = torch.where(nonfinite == 0, loss, torch.full_like(loss, torch.nan))
    return LossOutput(loss, report, nonfinite)


def _weighted(values: Tensor, aggregate: Aggregate, batch: TokenBatch, counted: Tensor, totals: Totals) -> Tensor:
    if totals.tokens == 0:
        return (values * 0.0).sum()  # keeps the graph: every rank runs the same backward
    coefficients = aggregate(batch.sequence, counted, batch.num_sequences, totals)
    return (values * coefficients.to(values.dtype)).sum()


def _ratio_report(ratio: Tensor, advantages: Tensor, keep: Tensor, pull: Tensor, terms: Terms) -> dict[str, Mean]:
    # nothing is read off tokens that do not pull: their live log-probs need not be computed
    report = {"ratio/mean": Mean.of(ratio, pull)}
    bounds = terms.bounds
    if bounds is not None:
        bound = pull if terms.exempt is None else pull & ~terms.exempt
        high = (advantages > 0) & (ratio > 1 + bounds.high) & bound
        low = (advantages < 0) & (ratio < 1 - bounds.low) & bound
        report |= {"ratio/clipped_high": Mean.of(high, keep), "ratio/clipped_low": Mean.of(low, keep)}
        if bounds.dual is not None:
            report["ratio/clipped_dual"] = Mean.of((advantages < 0) & (ratio > bounds.dual) & bound, keep)
    return report
