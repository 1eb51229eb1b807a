"""All decisions of one optimizer step that comes in parts: measure, reduce, advance, count, reduce; then the losses.

Statistics and denominators belong to the whole optimizer step over all ranks, so the sum of the losses of the parts,
and its gradient, do not depend on how the step was cut.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.batch_checks import refuse_impossible
from rlstab.core.comm import Comm, LocalComm
from rlstab.core.denominators import Counts, counted, counted_parts, counts_of
from rlstab.core.loss import LossOutput, Part, loss_of_part
from rlstab.core.method import measure_all
from rlstab.core.method_checks import check_state
from rlstab.core.method_settings import check_choices
from rlstab.core.objective import (
    Member,
    State,
    TokenObjective,
    active_methods,
    check_complete,
    check_methods,
    terms_of,
)
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled
from rlstab.core.terms import Terms, Totals
from rlstab.errors import MethodError, OutOfRange

Scope = Literal["step", "microbatch"]


@dataclass(frozen=True, eq=False)
class Plan:
    """All decisions of one optimizer step. Made by :func:`make_plan`.

    A part is given by its index in the list that the plan was made from, or by its batch. A host that builds its
    batches again for the backward pass gives the index; one that cuts the step differently asks for a :meth:`piece`.

    Attributes:
        state: what the objective carries into the next optimizer step.
        settled: the statistics of the whole optimizer step, from which terms are made.
        parts: what was decided about each part of this rank.
        kept: counts over kept tokens, the denominators of the policy term.
        everything: counts over all tokens.
        live_tokens: tokens whose policy term can have a gradient: kept, weight and advantage not zero.
        penalised: tokens under a penalty with a coefficient, summed over penalties.
        lr_scale: multiplies the scheduled learning rate of this optimizer step.
    """

    objective: TokenObjective
    state: State
    settled: Settled = field(repr=False)
    parts: Sequence[Part] = field(repr=False)
    kept: Totals
    everything: Totals
    live_tokens: int
    penalised: int
    lr_scale: float

    @property
    def has_no_gradient(self) -> bool:
        """Whether nothing in this optimizer step has a gradient. Skip it: momentum would still move the weights."""
        return self.live_tokens == 0 and self.penalised == 0

    def part(self, which: int | TokenBatch | Part) -> Part:
        """The decisions about one part; a part or a piece is returned as it is.

        Raises:
            OutOfRange: the plan was not made from this part.
        """
        if isinstance(which, Part):
            return which
        for index, part in enumerate(self.parts):
            if part.batch is which or index == which:
                return part
        raise OutOfRange(
            f"part {which}: none of the {len(self.parts)} parts of the plan. Pass one of their batches, or its index."
        )

    def piece(self, batch: TokenBatch) -> Part:
        """The decisions about whole sequences of this optimizer step that a host puts together after planning.

        Terms come from the settled statistics and the denominators stay those of the plan, so the losses of pieces that
        hold every sequence once, on all ranks, sum to the loss of the optimizer step. Only the terms are computed.

        Args:
            batch: the same evidence about some of the sequences that this rank measured, from any of its parts.

        Raises:
            OutOfRange: this rank did not measure a sequence of that id, or measured another number of tokens.
        """
        for sequence, length in _lengths(batch).items():
            measured = self._measured.get(sequence, 0)
            if measured != length:
                raise OutOfRange(
                    f"the sequence with id {sequence} has {length} tokens, and {measured} in the parts of this plan on "
                    f"this rank. Plan with every sequence, cut between sequences, and keep their sequence_ids."
                )
        with torch.no_grad():
            piece = Part.of(batch, self.settled, terms_of(self.objective, batch.evidence(), self.settled, self.state))
            return counted(piece, Counts(*counts_of(piece).tolist()))

    @cached_property
    def _measured(self) -> dict[int, int]:
        """The number of tokens of each sequence that this rank measured, by sequence id."""
        return {sequence: length for part in self.parts for sequence, length in _lengths(part.batch).items()}

    def terms(self, which: int | TokenBatch | Part) -> Terms:
        """The merged terms of one part."""
        return self.part(which).terms

    def live_rows(self, which: int | TokenBatch | Part) -> dict[str, Tensor]:
        """``(n,)`` bool for each live output: the tokens on which the loss differentiates or reads it.

        On the others it may hold any finite value, which affects no loss, gradient or metric. A ratio of the
        sequence, and a gate of whole sequences, read the log-probs of all its tokens.
        """
        return self.part(which).live_rows()

    def loss(
        self, which: int | TokenBatch | Part, policy: PolicyOutputs, *, anchor: PolicyOutputs | None = None
    ) -> LossOutput:
        """The loss of one part; sums over parts and ranks to the whole-batch loss.

        Where the host averages gradients over ranks, multiply it by the world size: the denominators are global.

        Args:
            which: index of the part, its batch, or a piece.
            policy: live outputs for its tokens, in their order.
            anchor: the values that are held constant; None takes those of ``policy``. Pass them only to check gradients
                by finite differences, where constants must not change with the input.

        Raises:
            OutOfRange: the loss of this part was already taken with a gradient.
        """
        part = self.part(which)
        if part.taken and anchor is None and torch.is_grad_enabled():
            raise OutOfRange(
                "the loss of this part was taken already, and would count twice. Plan again, or use torch.no_grad()."
            )
        out = loss_of_part(part, policy, anchor, self.kept, self.everything)
        object.__setattr__(part, "taken", part.taken or out.loss.requires_grad)
        return replace(out, state=self.state, lr_scale=self.lr_scale)


def make_plan(
    objective: TokenObjective,
    parts: Sequence[TokenBatch],
    state: State | None = None,
    comm: Comm | None = None,
    scope: Scope = "step",
) -> Plan:
    """Make every decision of one optimizer step from the evidence of all its parts.

    Args:
        objective: usually a composition.
        parts: all micro-batches of this rank in this optimizer step; empty on a rank without sequences.
        state: the state of the last plan; None is the initial one.
        comm: the ranks that share the optimizer step; None is only this process.
        scope: ``step`` is the optimizer step. ``microbatch`` takes thresholds and means from each part of this rank
            alone, as much published code does. It exists only to reproduce such code: the loss then depends on how the
            step is cut.

    Raises:
        NonFinite: NaN or Inf in the evidence, on any rank; every rank raises.
        MissingSignal: a part lacks a signal that the objective reads.
        MethodError: a method returned something other than the interface asks for.
        Conflict: a method requires another one that is missing.
        OutOfRange: ``scope`` is unknown, the state belongs to another objective, two parts share a sequence id, a
            log-prob is above 0, or an entropy is far below 0.
    """
    check_choices(make_plan, scope=scope)
    comm = LocalComm() if comm is None else comm
    batches = _checked_batches(objective, parts)
    initial = objective.init_state()
    if state is not None:
        check_state("the state", state, initial)
    refuse_impossible(objective.needs, batches, comm)
    with torch.no_grad():
        evidence = [batch.evidence() for batch in batches]
        stat, state = measure_all(objective, evidence, initial if state is None else state, comm)
        if scope == "microbatch":
            warnings.warn(
                "scope: microbatch takes statistics from each micro-batch of each rank alone, so the loss depends on "
                "how the optimizer step is cut. Use it only to reproduce published code.",
                stacklevel=2,
            )
        decided = []
        for batch, batch_evidence in zip(batches, evidence, strict=True):
            settled = stat if scope == "step" else measure_all(objective, [batch_evidence], state, LocalComm())[0]
            decided.append(Part.of(batch, settled, terms_of(objective, batch_evidence, settled, state)))
        lr_scale = _lr_scale(objective, decided if scope == "step" else [], stat, state)
        decided, total = counted_parts(decided, batches, comm)
    if total.invalid:
        raise _misfit(objective, decided, state, int(total.invalid))
    return Plan(
        objective=objective,
        state=state,
        settled=stat,
        parts=tuple(decided),
        kept=Totals(total.kept_tokens, total.kept_sequences),
        everything=Totals(total.tokens, total.sequences),
        live_tokens=int(total.live),
        penalised=int(total.penalised),
        lr_scale=lr_scale,
    )


def member_terms(plan: Plan, which: int | TokenBatch | Part) -> dict[str, Member]:
    """The terms of each method of a plan on one of its parts, before they are merged; computed again at each call.

    Keys are the prefixes of the methods' metrics: those of a composition, inside :func:`within` followed by ``/outer``
    and ``/inner``.
    """
    part = plan.part(which)
    with torch.no_grad():
        return plan.objective._member_terms(part.batch.evidence(), part.settled, plan.state)


def _lengths(batch: TokenBatch) -> dict[int, int]:
    """The number of tokens of each sequence of a batch, by sequence id, without empty ones."""
    pairs = zip(batch.here.sequence_ids.tolist(), batch.here.lengths.tolist(), strict=True)
    return {sequence: int(length) for sequence, length in pairs if length}


def _checked_batches(objective: TokenObjective, parts: Sequence[TokenBatch]) -> list[TokenBatch]:
    """The parts as a list; refuses what lacks a signal, and methods that do not fit."""
    check_methods("make_plan", (objective,))
    check_complete(objective)
    batches = list(parts)
    for batch in batches:
        for name in sorted(objective.needs):
            batch.signal(name)
    return batches


def _lr_scale(objective: TokenObjective, parts: Sequence[Part], stat: Settled, state: State) -> float:
    """The factor of the learning rate, taken from an empty part, since it is the same for every part.

    Raises:
        MethodError: it differs between parts, so ranks would train at different learning rates.
    """
    if "lr_scale" not in objective.writes:
        return 1.0
    lr_scale = terms_of(objective, objective._empty_part(), stat, state).lr_scale
    for part in parts:
        if part.terms.lr_scale != lr_scale:
            names = ", ".join(f"'{method.name}'" for method in active_methods(objective) if "lr_scale" in method.writes)
            raise MethodError(
                f"{names}: Terms.lr_scale is {part.terms.lr_scale} on a part of the optimizer step and {lr_scale} on "
                f"one without tokens, but all ranks share it. Make it from the statistics or the state, not the batch."
            )
    return 1.0 if lr_scale is None else lr_scale


def _misfit(objective: TokenObjective, parts: Sequence[Part], state: State, count: int) -> MethodError:
    """The error about invalid weights, bonuses or bounds, with the method that gave them."""
    invalid = [
        (f"'{key}'", int(member.terms.invalid_count))
        for part in parts
        for key, member in objective._member_terms(part.batch.evidence(), part.settled, state).items()
        if member.terms.invalid_count is not None
    ]
    name, count = next((pair for pair in invalid if pair[1]), ("on another rank a method", count))
    return MethodError(
        f"{name} gave {count} weights, bonuses or bounds that are NaN, infinite or negative. A weight is finite and at "
        f"least 0 (to turn a token around, use bonus), a bonus is finite, and a bound is at least 0."
    )
