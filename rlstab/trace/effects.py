"""What a step did to each token, and which method did it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.loss import Part, held_ratio
from rlstab.core.plan import Plan, member_terms
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.terms import Constants, Terms

#: What a method can do to a token.
ACTIONS = ("dropped", "boosted", "damped", "clipped", "regularised", "unclipped")
#: A gate or pull leaves a token alone that it changes by no more: a soft gate is seldom exactly 1.
ALIKE = 1e-3


@dataclass(frozen=True, eq=False)
class MethodTrace:
    """What one method did to the ``n`` tokens of a part.

    Attributes:
        name: of the method.
        actions: ``(n,)`` bool by action, those that its terms can do; see :func:`trace`.
        weight: ``(n,)`` its own weight, None where it has none.
        bonus: ``(n,)`` what it adds to the advantage, None where it adds nothing.
        gate: ``(n,)`` product of its gates, and of its pull in place of the ratio over the ratio; 1 where they do not
            act, None where it has neither.
    """

    name: str
    actions: Mapping[str, Tensor]
    weight: Tensor | None
    bonus: Tensor | None
    gate: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """What a step did to the ``n`` tokens of a part.

    Attributes:
        ratio: ``(n,)`` the ratio of the loss, as far as the live outputs are there; see :func:`trace`.
        weight: ``(n,)`` product of the methods' weights.
        kept: ``(n,)`` bool.
        bonus: ``(n,)`` sum of what the methods add to the advantage, None where none adds anything.
        unclipped: ``(n,)`` bool, None where no method does that.
        clipped: ``(n,)`` bool, stopped: beyond a bound in the direction in which it pulls, which the metrics
            ``ratio/clipped_high``, ``ratio/clipped_low`` and ``ratio/clipped_dual`` count, or by a gate or pull of 0.
        gate: ``(n,)`` product over the methods' gates and pull, None where no method has any.
        methods: by the prefix of their metrics.
    """

    ratio: Tensor
    weight: Tensor
    kept: Tensor
    bonus: Tensor | None
    unclipped: Tensor | None
    clipped: Tensor
    gate: Tensor | None
    methods: Mapping[str, MethodTrace]


@torch.no_grad()
def trace(plan: Plan, batch: TokenBatch, policy: PolicyOutputs) -> Trace:
    """Trace one of the parts of a plan.

    A method has *dropped* a token that it does not keep; *boosted* it by a weight above 1, by a bonus that makes it
    pull harder in the direction of its advantage, or by a gate or pull that makes more of its ratio; *damped* it by a
    weight below 1, by a bonus against that direction, or by a gate or pull that makes less of its ratio; *clipped* it
    where the method owns the bounds, gate or pull that stopped it; *regularised* it where it is under a penalty of the
    method; *unclipped* it where it took its trust region away. Gates and surrogates count where a token pulls and is
    not unclipped, and where they change it by more than :data:`ALIKE`.

    Args:
        plan: the decisions of the step.
        batch: one of the parts that the plan was made from.
        policy: live outputs for its tokens, read without gradient. A trainer may have put anything finite where nothing
            pulls; the ratio of the trace is then of no worth there, and everything else does not depend on it.
    """
    part, live = plan.part(batch), policy.constant()
    merged = part.terms
    ratio = held_ratio(part, live)
    everywhere = torch.ones_like(batch.sequence, dtype=torch.bool)
    held, bound = Constants(live, part.advantages, part.kept), part.bound
    beyond, gate = _beyond(part, ratio) & bound, _gate(merged, ratio, held, bound)
    methods = {}
    for key, member in member_terms(plan, batch).items():
        own = _gate(member.terms, ratio, held, bound)
        actions = _actions(member.terms, batch.advantages, beyond, own, everywhere)
        methods[key] = MethodTrace(member.name, actions, member.terms.weight, member.terms.bonus, own)
    return Trace(
        ratio=ratio,
        weight=torch.ones_like(ratio) if merged.weight is None else merged.weight,
        kept=part.kept,
        bonus=merged.bonus,
        unclipped=merged.unclipped,
        clipped=beyond if gate is None else beyond | (gate == 0),
        gate=gate,
        methods=methods,
    )


def _beyond(part: Part, ratio: Tensor) -> Tensor:
    bounds = part.terms.bounds
    if bounds is None:
        return torch.zeros_like(part.has_gradient)
    return torch.stack(list(bounds.stops(ratio, part.advantages).values())).any(0)


def _gate(terms: Terms, ratio: Tensor, constants: Constants, bound: Tensor) -> Tensor | None:
    factors = [gate.fn(ratio, constants) for gate in terms.gates.values() if gate.acts]
    if terms.surrogate is not None:
        factors.append(terms.surrogate.fn(ratio, constants) / ratio)
    if not factors:
        return None
    return torch.where(bound, torch.stack([factor.to(ratio.dtype) for factor in factors]).prod(0), 1.0)


def _actions(
    terms: Terms, advantages: Tensor, beyond: Tensor, gate: Tensor | None, everywhere: Tensor
) -> dict[str, Tensor]:
    actions: dict[str, Tensor] = {}

    def add(action: str, where: Tensor) -> None:
        actions[action] = actions.get(action, ~everywhere) | where

    if terms.keep is not None:
        add("dropped", ~terms.keep)
    if terms.weight is not None:
        add("boosted", terms.weight > 1)
        add("damped", terms.weight < 1)
    if terms.bonus is not None:
        along = torch.where(advantages == 0, terms.bonus.abs(), terms.bonus * advantages.sign())
        add("boosted", along > 0)
        add("damped", along < 0)
    if terms.bounds is not None:
        add("clipped", beyond)
    if gate is not None:
        add("boosted", gate > 1 + ALIKE)
        add("damped", (gate < 1 - ALIKE) & (gate != 0))
        add("clipped", gate == 0)
    for penalty in terms.penalties.values():
        if penalty.coefficient != 0:
            add("regularised", everywhere if penalty.where is None else penalty.where)
    if terms.unclipped is not None:
        add("unclipped", terms.unclipped)
    return actions
