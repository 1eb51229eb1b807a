"""One optimizer step that comes in parts: measure, reduce, advance, count, reduce; then a loss for each part.

The statistics and the denominators belong to the whole optimizer step over all ranks, so the sum of the parts' losses,
and its gradient, do not depend on how it was cut.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rlstab.core.batch import PolicyOutputs, TokenBatch
from rlstab.core.comm import Comm, LocalComm
from rlstab.core.loss import LossOutput, counts, loss_of_part, pulling
from rlstab.core.objective import State, TokenObjective
from rlstab.core.stats import Settled
from rlstab.core.terms import Terms, Totals
from rlstab.errors import NonFinite

Scope = Literal["step", "microbatch"]


@dataclass(frozen=True, eq=False)
class Plan:
    """All decisions of one optimizer step. Made by :func:`make_plan`.

    Attributes:
        state: what the objective carries into the next step.
        kept: counts over kept tokens, the denominators of the policy term.
        everything: counts over all tokens.
        live_tokens: tokens whose surrogate can have a gradient: kept, weight and advantage not zero.
        penalised: tokens under a penalty with a coefficient, summed over penalties.
        lr_scale: multiplies the scheduled learning rate of this step.
    """

    objective: TokenObjective
    state: State
    kept: Totals
    everything: Totals
    live_tokens: int
    penalised: int
    lr_scale: float
    _terms: dict[int, tuple[TokenBatch, Terms]] = field(repr=False)
    _settled: dict[int, Settled] = field(repr=False)

    @property
    def silent(self) -> bool:
        """Nothing in this step has a gradient. Skip it: an optimizer with momentum would move the weights."""
        return self.live_tokens == 0 and self.penalised == 0

    def terms(self, batch: TokenBatch) -> Terms:
        """The merged terms of one of the parts that the plan was made from."""
        known = self._terms.get(id(batch))
        if known is None or known[0] is not batch:
            raise ValueError(
                "this batch is not one of the parts that the plan was made from. Pass the same TokenBatch objects to "
                "make_plan and to plan.loss: statistics and denominators are theirs."
            )
        return known[1]

    def settled(self, batch: TokenBatch) -> Settled:
        """The statistics from which the terms of one of the parts were made."""
        self.terms(batch)
        return self._settled[id(batch)]

    def live_rows(self, batch: TokenBatch) -> dict[str, Tensor]:
        """``(n,)`` bool for each live output: the tokens on which the loss differentiates it.

        On the others it may hold any finite value: neither the gradient nor a metric depends on it. A ratio of the
        sequence reads the log-probs of all its tokens.
        """
        terms = self.terms(batch)
        own = pulling(terms, batch)
        if terms.ratio is not None:
            reached = torch.zeros(batch.num_sequences, dtype=torch.bool, device=own.device)
            reached[batch.sequence[own]] = True
            own = reached[batch.sequence]
        rows = {"logprobs": own}
        for penalty in terms.penalties.values():
            where = torch.ones_like(own) if penalty.where is None else penalty.where
            for name in {"logprobs", *penalty.reads}:
                rows[name] = rows[name] | where if name in rows else where
        return rows

    def loss(self, batch: TokenBatch, policy: PolicyOutputs, *, anchor: PolicyOutputs | None = None) -> LossOutput:
        """The loss of one part; sums over parts and ranks to the whole-batch loss.

        Where the host averages gradients over ranks, multiply it by the world size: the denominators are global.

        Args:
            batch: one of the parts that the plan was made from.
            policy: live outputs for its tokens.
            anchor: what counts as constant; None takes the policy's own values. Given only to check gradients by
                finite differences, where the constants must not move with the input.
        """
        held = policy.constant() if anchor is None else anchor
        return loss_of_part(self.terms(batch), batch, policy, held, self.kept, self.everything)


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
        state: of the last plan; None is the initial one.
        comm: the ranks that share the step; None is this process alone.
        scope: ``microbatch`` takes thresholds and means from each part of this rank alone, as much published code
            does. It exists only to reproduce such code: the loss then depends on how the optimizer step is cut.

    Raises:
        NonFinite: NaN or Inf in the evidence, on any rank; every rank raises.
        MissingSignal: a part lacks a signal that the objective reads.
    """
    comm = LocalComm() if comm is None else comm
    parts = list(parts)
    for part in parts:
        for name in sorted(objective.needs):
            part.signal(name)
    _refuse_nonfinite(objective, parts, comm)
    with torch.no_grad():
        stat, state = objective.settle(parts, objective.init_state() if state is None else state, comm)
        merged: dict[int, tuple[TokenBatch, Terms]] = {}
        settled: dict[int, Settled] = {}
        if scope == "microbatch":
            warnings.warn(
                "scope: microbatch takes statistics from each micro-batch of each rank alone, so the loss depends on "
                "how the optimizer step is cut. Use it only to reproduce published code.",
                stacklevel=2,
            )
        for part in parts:
            own = stat if scope == "step" else objective.settle([part], state, LocalComm())[0]
            merged[id(part)] = part, objective.terms(part, own, state)
            settled[id(part)] = own
        if parts and scope == "step":  # the same in every part
            lr_scale = merged[id(parts[0])][1].lr_scale
        else:
            lr_scale = objective.terms(TokenBatch.empty(objective.needs), stat, state).lr_scale

        tally = torch.zeros(6, dtype=torch.float64)
        for part, terms in (merged[id(part)] for part in parts):
            kept, sequences = counts(part, terms.keep)
            # where every sequence has a kept token, it has a token
            whole = (len(part), sequences) if sequences == part.num_sequences else counts(part, None)
            tally += torch.tensor([kept, sequences, *whole, *_live(part, terms)])
        kept_tokens, kept_sequences, tokens, sequences, live, penalised = comm.sum(tally).tolist()
    return Plan(
        objective=objective,
        state=state,
        kept=Totals(kept_tokens, kept_sequences),
        everything=Totals(tokens, sequences),
        live_tokens=int(live),
        penalised=int(penalised),
        lr_scale=1.0 if lr_scale is None else lr_scale,
        _terms=merged,
        _settled=settled,
    )


def _live(batch: TokenBatch, terms: Terms) -> tuple[int, int]:
    penalised = sum(
        len(batch) if penalty.where is None else int(penalty.where.count_nonzero())
        for penalty in terms.penalties.values()
        if penalty.coefficient != 0
    )
    return int(pulling(terms, batch).count_nonzero()), penalised


def _refuse_nonfinite(objective: TokenObjective, parts: Sequence[TokenBatch], comm: Comm) -> None:
    names = ["old_logprobs", "logprobs", "advantages", *sorted(objective.needs)]
    bad = torch.zeros(len(names), dtype=torch.float64)
    for part in parts:
        present = dict(part.per_token())
        # NaN and Inf survive a sum; a sum of finite values that overflows is looked at again
        if bool(torch.stack([present[name].sum().double() for name in names]).isfinite().all()):
            continue
        bad += torch.tensor([float((~torch.isfinite(present[name])).sum()) for name in names], dtype=torch.float64)
    found = {name: int(count) for name, count in zip(names, comm.sum(bad).tolist(), strict=True) if count}
    if found:
        listed = ", ".join(f"{count} in '{name}'" for name, count in found.items())
        raise NonFinite(
            f"the evidence of this step has NaN or Inf values: {listed}. The step was refused and nothing was changed. "
            f"A log-prob of -inf comes from a sampler that filtered its own token (top-k, top-p); NaN from weights or "
            f"rewards that are NaN."
        )
