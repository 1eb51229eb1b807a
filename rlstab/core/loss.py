"""The one place where terms become a loss.

::

    L = sum_i c_i  * keep_i * weight_i * gate_i * clipped(ratio_i, A_i + bonus_i, bounds_i, unclipped_i)
                                              or -surrogate(ratio_i) * (A_i + bonus_i)
      + sum_k coef_k * sum_i c0_i * where_ki * fn_k(policy, anchor)_i

With ``support`` the live log-probs are those over the tokens that the sampler kept, in all of this.

``c`` comes from the counts of kept tokens, ``c0`` from those of all tokens, both over the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.batch_checks import impossible
from rlstab.core.method import State
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean, Settled, total
from rlstab.core.surrogate import bounded_exp, clipped_surrogate, token_log_ratio
from rlstab.core.terms import Aggregate, Constants, Terms, Totals
from rlstab.errors import MissingSignal, ShapeError


@dataclass(frozen=True, eq=False)
class LossOutput:
    """The loss of one part of the optimizer step.

    Attributes:
        loss: scalar; sums over parts and ranks to the whole-batch loss.
        report: metrics as mergeable summaries.
        nonfinite: int64 scalar, tokens with a live value or a gate that is NaN, Inf or impossible (a log-prob above
            0, a negative entropy), at least 1 where the loss itself overflows. Then the loss is NaN.
        state: what the objective carries into the next optimizer step; the same in every part.
        lr_scale: multiplies the scheduled learning rate of this optimizer step; the same in every part.
    """

    loss: Tensor
    report: Mapping[str, Mean]
    nonfinite: Tensor
    state: State = field(default_factory=dict)
    lr_scale: float = 1.0

    def __repr__(self) -> str:
        return f"LossOutput(loss={float(self.loss.detach()):.4g}, {len(self.report)} metrics)"

    def metrics(self) -> dict[str, float]:
        """The report as numbers, without metrics that counted nothing."""
        return {name: mean.value for name, mean in self.report.items() if float(mean.count)}


def token_mean(sequence: Tensor, counted: Tensor, num_sequences: int, totals: Totals) -> Tensor:
    """``(n,)`` default of the aggregate slot: every counted token weighs ``1 / N``."""
    # filled on the device: sending a number there would wait for all kernels
    return torch.full((), 1.0 / totals.tokens, dtype=torch.float64, device=counted.device).expand(counted.shape)


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a planned optimizer step, and every decision about it.

    Attributes:
        batch: the evidence of the part.
        settled: the statistics from which its terms were made.
        terms: merged over all methods.
        advantages: ``(n,)``, bonuses included.
        has_gradient: ``(n,)`` bool, the tokens whose policy term can have one: kept, weight and advantage not zero.
        trains: whether any token has; known once the plan was counted.
        penalised: whether any token is under a penalty with a coefficient; likewise.
        live_here: :meth:`live_rows` on the CPU, if the plan read them from another device.
        taken: whether its loss was made with a gradient; set by :meth:`rlstab.core.plan.Plan.loss`.
    """

    batch: TokenBatch
    settled: Settled
    terms: Terms
    advantages: Tensor
    has_gradient: Tensor
    trains: bool = False
    penalised: bool = False
    live_here: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    taken: bool = False

    @classmethod
    def of(cls, batch: TokenBatch, settled: Settled, terms: Terms) -> Part:
        """A part from what the methods asked for."""
        advantages = batch.advantages if terms.bonus is None else batch.advantages + terms.bonus
        has_gradient = advantages.bool()  # is not zero
        if terms.weight is not None:
            has_gradient = has_gradient & terms.weight.bool()
        if terms.keep is not None:
            has_gradient = has_gradient & terms.keep
        return cls(batch, settled, terms, advantages, has_gradient)

    @property
    def kept(self) -> Tensor:
        """``(n,)`` bool, the tokens that no method drops."""
        return torch.ones_like(self.has_gradient) if self.terms.keep is None else self.terms.keep

    @property
    def bound(self) -> Tensor:
        """``(n,)`` bool, the tokens that pull, and to which a trust region applies if there is one."""
        return self.has_gradient if self.terms.unclipped is None else self.has_gradient & ~self.terms.unclipped

    def live_rows(self) -> dict[str, Tensor]:
        """``(n,)`` bool for each live output: the tokens on which the loss differentiates or reads it."""
        read, surrogate = self.has_gradient, self.terms.surrogate
        whole_sequences = any(gate.whole_sequences for gate in self.terms.gates.values())
        if whole_sequences or self.terms.ratio is not None or (surrogate is not None and surrogate.whole_sequences):
            read = self.batch.spread(self.batch.sequence_total(read) > 0)
        rows = {"logprobs": read}
        for penalty in self.terms.penalties.values():
            where = torch.ones_like(read) if penalty.where is None else penalty.where
            for name in {"logprobs", *penalty.reads}:
                rows[name] = rows[name] | where if name in rows else where
        return rows | {"log_support_mass": rows["logprobs"]} if self.terms.support else rows


def loss_of_part(
    part: Part, policy: PolicyOutputs, anchor: PolicyOutputs | None, kept_totals: Totals, all_totals: Totals
) -> LossOutput:
    """The loss of one part, from its terms and the counts of the whole optimizer step.

    Args:
        part: the part with its terms.
        policy: live outputs for its tokens.
        anchor: the values that are held constant; None takes those of the policy.
        kept_totals: counts over kept tokens, the denominators of the policy term.
        all_totals: counts over all tokens, the denominators of penalties.

    Raises:
        ShapeError: batch and policy differ in their number of tokens or their device.
        MissingSignal: nothing that is differentiated has a gradient, or a penalty has none.
    """
    batch, terms = part.batch, part.terms
    old, live = batch.old_logprobs, policy.logprobs
    if live.shape != old.shape or live.device != old.device:
        raise ShapeError(
            f"the policy has {live.numel()} log-probs on {live.device} for a batch of {len(batch)} tokens on "
            f"{old.device}. Build it with PolicyOutputs.from_padded(batch, ...) from the same rows, on one device."
        )
    needed = [policy.logprobs] if part.trains else policy.present() if part.penalised else []
    if needed and torch.is_grad_enabled() and not any(values.requires_grad for values in needed):
        raise MissingSignal(
            "the log-probs of the policy require no grad. Pass those that were not detached, or use torch.no_grad()."
        )
    raw = policy
    if terms.support:
        policy, anchor = raw.over_support(), anchor and anchor.over_support()
    aggregate = terms.aggregate or token_mean
    keep = part.kept
    constants = Constants(policy.constant() if anchor is None else anchor, part.advantages, keep)

    ratio = _ratio(policy, constants, part)
    # NaN where a live value is NaN or Inf, or impossible where it is read; else 0
    zeros = _without_impossible(0 * policy.logprobs.detach(), "logprobs", raw, part.has_gradient)
    report: dict[str, Mean] = {}
    policy_term = clipped_surrogate(ratio, part.advantages, terms.bounds, terms.unclipped)
    factor = _coefficients(aggregate, batch, keep, kept_totals, policy_term.dtype)
    if terms.weight is not None:
        factor = factor * terms.weight.to(factor.dtype)
    if terms.gates or terms.surrogate is not None:
        with torch.no_grad():
            constant = ratio.detach() if anchor is None else _ratio(constants.anchor, constants, part)
            gate = _gates(part, constant, constants, report)
            zeros.add_(gate, alpha=0)
        factor = factor * gate
    if terms.keep is not None:
        factor = factor * keep
    loss = (policy_term * factor).sum()

    report |= terms.report
    penalised: dict[Aggregate, Tensor] = {}
    for name, penalty in terms.penalties.items():
        value = penalty.fn(policy, constants.anchor)
        if part.penalised and penalty.coefficient != 0 and torch.is_grad_enabled() and not value.requires_grad:
            raise MissingSignal(
                f"the penalty '{name}' has no gradient: it reads nothing that requires grad. Let it read `policy`, not "
                f"`anchor`, and pass live {' and '.join(sorted(penalty.reads)) or 'log-probs'} that were not detached."
            )
        for read in penalty.reads:
            zeros = _without_impossible(zeros, read, policy, penalty.where)
        if penalty.where is not None:
            value = torch.where(penalty.where, value, 0.0)
        report[f"{name}/value"] = _mean_where(value, penalty.where)
        scale, mode = penalty.coefficient, penalty.aggregate or aggregate
        penalised[mode] = torch.add(penalised[mode], value, alpha=scale) if mode in penalised else scale * value
    for mode, values in penalised.items():
        factor = _coefficients(mode, batch, torch.ones_like(keep), all_totals, values.dtype)
        loss = loss + (values * factor).sum()
        zeros.add_(values.detach(), alpha=0)

    # the ratios of other tokens are not read: their live log-probs need not be computed
    constant, pulls, mean_kept = ratio.detach(), part.has_gradient, Mean.of(keep)
    report |= {"ratio/mean": _mean_where(constant * pulls, pulls), "tokens/kept": mean_kept}
    if terms.bounds is not None:
        for side, stopped in terms.bounds.stops(constant, part.advantages).items():
            report[f"ratio/clipped_{side}"] = Mean((stopped & part.bound).count_nonzero().double(), mean_kept.total)
    if terms.support:
        zeros = _without_impossible(zeros, "log_support_mass", policy, pulls)
        mass = policy.signal("log_support_mass").detach().exp() * pulls
        report["ratio/support_mass"] = _mean_where(mass, pulls)
    if batch.entropies is not None:
        finite = batch.entropies.isfinite()
        report["tokens/entropy"] = mean = Mean.of(batch.entropies, finite)
        report["tokens/entropy_nonfinite"] = Mean(len(batch) - mean.count, mean.count.new_full((), len(batch)))
    # a sum of finite values may overflow, such as advantages of 3e38 in float32
    nonfinite = torch.maximum(zeros.count_nonzero(), (0 * loss.detach()).count_nonzero())
    # clamping would hide a NaN or Inf log-prob behind a finite loss
    loss = torch.where(nonfinite == 0, loss, torch.nan)
    return LossOutput(loss, report, nonfinite)


def _without_impossible(zeros: Tensor, name: str, policy: PolicyOutputs, where: Tensor | None) -> Tensor:
    """``zeros`` with NaN where a live output has an impossible value; other finite values are allowed."""
    invalid = impossible(name, policy.signal(name).detach())
    return zeros.masked_fill_(invalid if where is None else invalid & where, torch.nan)


def held_ratio(part: Part, live: PolicyOutputs) -> Tensor:
    """``(n,)`` the ratio that the loss of a part uses, from live outputs without gradient."""
    live = live.over_support() if part.terms.support else live
    return _ratio(live, Constants(live, part.advantages, part.kept), part)


def _ratio(policy: PolicyOutputs, constants: Constants, part: Part) -> Tensor:
    log_ratio = part.terms.ratio
    if log_ratio is None:
        return bounded_exp(token_log_ratio(policy, constants.anchor, part.batch))
    # a method's own function may be anything on tokens that were dropped; the default is finite
    return bounded_exp(torch.where(constants.keep, log_ratio(policy, constants), 0.0))


def _gates(part: Part, ratio: Tensor, constants: Constants, report: dict[str, Mean]) -> Tensor:
    """``(n,)`` product of the gates that act; 1 where the gradient is zero, since live values may be missing there.

    The surrogate counts as one, relative to the ratio that it replaces.
    """
    product, bound = torch.ones_like(ratio), part.bound
    if part.terms.surrogate is not None:
        value = part.terms.surrogate.fn(ratio, constants).to(ratio.dtype)
        report["ratio/surrogate"] = Mean.of(value, part.has_gradient)
        report["ratio/stopped"] = Mean.of(value == 0, bound)
        product = torch.where(bound, value / ratio, 1.0)
    for name, gate in part.terms.gates.items():
        value = gate.fn(ratio, constants).to(ratio.dtype)
        where = part.has_gradient if gate.where is None else part.has_gradient & gate.where
        report[f"{name}/gate"] = Mean.of(value, where)
        report[f"{name}/stopped"] = Mean.of(value == 0, where)
        if gate.acts:
            product = product * torch.where(bound, value, 1.0)
    return product


def _coefficients(
    aggregate: Aggregate, batch: TokenBatch, counted: Tensor, totals: Totals, dtype: torch.dtype
) -> Tensor:
    if totals.tokens == 0:  # zeros keep the graph: every rank runs the same backward
        return torch.zeros_like(counted, dtype=dtype)
    coefficients = aggregate(batch.sequence, counted, batch.num_sequences, totals)
    if coefficients.numel() and coefficients.stride() == (0,):  # one number for all tokens: converted once
        return coefficients[:1].to(dtype).expand(coefficients.shape)
    return coefficients.to(dtype)


def _mean_where(values: Tensor, where: Tensor | None) -> Mean:
    """The mean of ``(n,)`` values that are zero where ``where`` is False."""
    return Mean.of(values) if where is None else Mean(total(values.detach()), where.count_nonzero().double())
