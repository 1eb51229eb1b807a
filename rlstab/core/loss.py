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
from rlstab.core.compare import greater, less, nonzero, numbers
from rlstab.core.slope import with_slope
from rlstab.core.stats import Mean, total
from rlstab.core.terms import Aggregate, Bounds, Terms, Totals
from rlstab.errors import ShapeError

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
    held = ratio.detach()
    rising = torch.clamp(held, max=1 + bounds.high)
    falling = torch.clamp(held, min=1 - bounds.low)
    if bounds.dual is not None:
        falling = torch.clamp(falling, max=bounds.dual)
    inside = torch.where(less(advantages, 0), falling, rising)
    if exempt is not None:
        inside = torch.where(exempt, held, inside)
    push = -advantages
    value = push * inside
    return with_slope(ratio, value, inside.eq_(held).mul_(push))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``(n,)`` exponential of a log-ratio that is clamped; the gradient beyond the clamp is zero."""
    free = log_ratio.detach()
    held = free.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = held.exp()
    return with_slope(log_ratio, ratio, held.eq_(free).mul_(ratio))


def token_mean(sequence: Tensor, counted: Tensor, num_sequences: int, totals: Totals) -> Tensor:
    """``(n,)`` default of the aggregate slot: every counted token weighs ``1 / N``."""
    return torch.tensor(1.0 / totals.tokens, dtype=torch.float64, device=counted.device).expand(counted.shape)


def counts(batch: TokenBatch, where: Tensor | None) -> tuple[int, int]:
    """Tokens of a part that count, and sequences with at least one such token."""
    tokens = len(batch) if where is None else int(where.count_nonzero())
    marks = torch.ones_like(batch.sequence, dtype=torch.float32) if where is None else numbers(where).float()
    seen = torch.zeros(batch.num_sequences, device=marks.device).scatter_reduce_(0, batch.sequence, marks, "amax")
    return tokens, int(seen.count_nonzero())


def pulling(terms: Terms, batch: TokenBatch) -> Tensor:
    """``(n,)`` bool, the tokens whose surrogate can have a gradient: kept, weight and advantage not zero."""
    pull = nonzero(batch.advantages if terms.bonus is None else batch.advantages + terms.bonus)
    if terms.weight is not None:
        pull = pull & nonzero(terms.weight)
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
    guarded = terms.keep is not None and not (terms.ratio is None and terms.surrogate is None)
    if guarded:  # a method's own function may be anything on tokens that were dropped; the defaults are finite
        log_ratio = torch.where(keep, log_ratio, 0.0)
    ratio = bounded_exp(log_ratio)
    advantages = batch.advantages if terms.bonus is None else batch.advantages + terms.bonus
    surrogate = (terms.surrogate or clipped_surrogate)(policy, anchor, ratio, advantages, terms.bounds, terms.exempt)
    if guarded:
        surrogate = torch.where(keep, surrogate, 0.0)
    factor = _coefficients(aggregate, batch, keep, kept, surrogate.dtype)
    if terms.weight is not None:
        factor = factor * terms.weight
    if terms.keep is not None:
        factor = factor * numbers(keep)  # a zero times what is finite costs less than a `where` and its backward
    loss = (surrogate * factor).sum()

    report = dict(terms.report)
    penalised: Tensor | None = None
    for name, penalty in terms.penalties.items():
        value = penalty.fn(policy, anchor)
        if penalty.where is not None:
            value = torch.where(penalty.where, value, 0.0)
        report[f"{name}/value"] = _mean_where(value, penalty.where)
        scale = penalty.coefficient
        penalised = scale * value if penalised is None else torch.add(penalised, value, alpha=scale)
    known = 0 * policy.logprobs.detach()  # NaN where a live value is NaN or Inf, else 0
    if penalised is not None:
        factor = _coefficients(aggregate, batch, present, everything, penalised.dtype)
        loss = loss + (penalised * factor).sum()
        known.add_(penalised.detach(), alpha=0)

    report |= _ratio_report(ratio.detach(), batch, advantages, keep, terms)
    if batch.entropies is not None:
        report["tokens/entropy"] = Mean.of(batch.entropies)
    nonfinite = known.count_nonzero()
    # clamping would hide a NaN or Inf log-prob behind a finite loss
    loss = torch.where(nonfinite == 0, loss, torch.nan)
    return LossOutput(loss, report, nonfinite)


def _coefficients(
    aggregate: Aggregate, batch: TokenBatch, counted: Tensor, totals: Totals, dtype: torch.dtype
) -> Tensor:
    if totals.tokens == 0:  # zeros keep the graph: every rank runs the same backward
        return torch.zeros_like(counted, dtype=dtype)
    return aggregate(batch.sequence, counted, batch.num_sequences, totals).to(dtype)


def _mean_where(values: Tensor, where: Tensor | None) -> Mean:
    """Of ``(n,)`` values that are zero elsewhere."""
    return Mean.of(values) if where is None else Mean(total(values.detach()), where.count_nonzero().double().cpu())


def _ratio_report(ratio: Tensor, batch: TokenBatch, advantages: Tensor, keep: Tensor, terms: Terms) -> dict[str, Mean]:
    pull = pulling(terms, batch)  # nothing is read off other tokens: their live log-probs need not be computed
    kept = Mean.of(keep)
    report = {"ratio/mean": _mean_where(ratio * numbers(pull), pull), "tokens/kept": kept}

    def share(stopped: Tensor) -> Mean:
        return Mean((stopped & bound).count_nonzero().double(), kept.total.cpu())

    bounds = terms.bounds
    if bounds is not None:
        bound = pull if terms.exempt is None else pull & ~terms.exempt
        rewarded = batch.rewarded if terms.bonus is None else greater(advantages, 0)
        punished = batch.punished if terms.bonus is None else less(advantages, 0)
        report["ratio/clipped_high"] = share(rewarded & greater(ratio, 1 + bounds.high))
        report["ratio/clipped_low"] = share(punished & less(ratio, 1 - bounds.low))
        if bounds.dual is not None:
            report["ratio/clipped_dual"] = share(punished & greater(ratio, bounds.dual))
    return report
