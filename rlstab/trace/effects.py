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
from rlstab.core.terms import Terms

#: What a method can do to a token.
ACTIONS = ("dropped", "boosted", "damped", "clipped", "regularised", "exempt")


@dataclass(frozen=True, eq=False)
class MethodTrace:
    """What one method did to the ``n`` tokens of a part.

    Attributes:
        name: of the method.
        actions: ``(n,)`` bool by action, those that its terms can do; see :func:`trace`.
        weight: ``(n,)`` its own weight, None where it has none.
        bonus: ``(n,)`` what it adds to the advantage, None where it adds nothing.
    """

    name: str
    actions: Mapping[str, Tensor]
    weight: Tensor | None
    bonus: Tensor | None


@dataclass(frozen=True, eq=False)
class Trace:
    """What a step did to the ``n`` tokens of a part.

    Attributes:
        ratio: ``(n,)`` the ratio of the loss, as far as the live outputs are there; see :func:`trace`.
        weight: ``(n,)`` product of the methods' weights.
        kept: ``(n,)`` bool.
        bonus: ``(n,)`` sum of what the methods add to the advantage, None where none adds anything.
        exempt: ``(n,)`` bool, None where no method exempts.
        clipped: ``(n,)`` bool, beyond a bound in the direction in which it pulls: what the metrics
            ``ratio/clipped_high``, ``ratio/clipped_low`` and ``ratio/clipped_dual`` count.
        methods: by the prefix of their metrics.
    """

    ratio: Tensor
    weight: Tensor
    kept: Tensor
    bonus: Tensor | None
    exempt: Tensor | None
    clipped: Tensor
    methods: Mapping[str, MethodTrace]


@torch.no_grad()
def trace(plan: Plan, batch: TokenBatch, policy: PolicyOutputs) -> Trace:
    """Trace one of the parts of a plan.

    A method has *dropped* a token that it does not keep; *boosted* it by a weight above 1, or by a bonus that makes it
    pull harder in the direction of its advantage; *damped* it by a weight below 1, or by a bonus against that
    direction; *clipped* it where the method owns the bounds that stopped it; *regularised* it where it is under a
    penalty of the method; *exempted* it from the bounds.

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
    kept = everywhere if merged.keep is None else merged.keep
    clipped = _clipped(part, ratio)
    return Trace(
        ratio=ratio,
        weight=torch.ones_like(ratio) if merged.weight is None else merged.weight,
        kept=kept,
        bonus=merged.bonus,
        exempt=merged.exempt,
        clipped=clipped,
        methods={
            key: MethodTrace(
                one.name, _actions(one.terms, batch.advantages, clipped, everywhere), one.terms.weight, one.terms.bonus
            )
            for key, one in member_terms(plan, batch).items()
        },
    )


def _clipped(part: Part, ratio: Tensor) -> Tensor:
    bounds, exempt = part.terms.bounds, part.terms.exempt
    if bounds is None:
        return torch.zeros_like(part.pulls)
    beyond = torch.stack(list(bounds.stops(ratio, part.advantages).values())).any(0)
    return beyond & (part.pulls if exempt is None else part.pulls & ~exempt)


def _actions(terms: Terms, advantages: Tensor, clipped: Tensor, everywhere: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if terms.keep is not None:
        found["dropped"] = ~terms.keep
    if terms.weight is not None:
        found["boosted"], found["damped"] = terms.weight > 1, terms.weight < 1
    if terms.bonus is not None:
        along = torch.where(advantages == 0, terms.bonus.abs(), terms.bonus * advantages.sign())
        found["boosted"] = found.get("boosted", ~everywhere) | (along > 0)
        found["damped"] = found.get("damped", ~everywhere) | (along < 0)
    if terms.bounds is not None:
        found["clipped"] = clipped
    for penalty in terms.penalties.values():
        if penalty.coefficient != 0:
            where = everywhere if penalty.where is None else penalty.where
            found["regularised"] = found.get("regularised", ~everywhere) | where
    if terms.exempt is not None:
        found["exempt"] = terms.exempt
    return found
