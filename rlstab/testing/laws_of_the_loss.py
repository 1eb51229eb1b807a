"""Laws of the loss: its numbers are finite and precise, its gradient is its slope, and nothing pulls that must not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlstab.core.compose import compose, walk
from rlstab.core.loss import held_ratio
from rlstab.core.objective import TokenObjective
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.testing import tolerances
from rlstab.testing.agreement import BrokenLaw, close
from rlstab.testing.law import Case, Dropping, NotHere, leaves_of, policy_part
from rlstab.testing.outcome import run_whole
from rlstab.testing.slopes import check_slopes
from rlstab.testing.steps import Step
from rlstab.testing.watch import Wide


def finite(method: TokenObjective, case: Case) -> None:
    """Extreme log-probs, ratios and entropies, in float64 and in float32."""
    for where, step in (("", case.first), (" in float32", case.first.cast(torch.float32))):
        outcome = run_whole(method, step)
        numbers = {"the loss": outcome.loss, "lr_scale": outcome.lr_scale}
        numbers |= {f"the metric '{name}'": one.value for name, one in outcome.report.items() if float(one.count)}
        for place, value in leaves_of(outcome.state):
            if isinstance(value, Tensor):
                numbers[f"the largest of {place}"] = (
                    float(value.detach().double().abs().max()) if value.numel() else 0.0
                )
            elif isinstance(value, int | float):
                numbers[place] = float(value)
        for name, gradient in outcome.gradients.items():
            numbers[f"the gradient of '{name}'"] = _largest(gradient)
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise BrokenLaw(
                    f"{name} is {number}{where}. Clamp a log before `exp`, and give an empty set a value of its own."
                )


def _largest(values: Tensor) -> float:
    return float(values.detach().double().abs().max()) if values.numel() else 0.0


def precision(method: TokenObjective, case: Case) -> None:
    """float32 and bfloat16 inputs give what float64 gives on the same numbers; float64 is never narrowed to half."""
    batch = case.first.batch()
    with Wide():
        make_plan(method, [batch]).loss(batch, PolicyOutputs(**case.first.leaves())).loss.backward()
    for dtype in (torch.float32, torch.bfloat16):
        rounded = case.first.cast(dtype)
        exact = Step(
            {name: values.double() for name, values in rounded.evidence.items()},
            {name: values.double() for name, values in rounded.live.items()},
            rounded.sequence,
            rounded.position,
            rounded.sequence_ids,
            rounded.group_ids,
        )
        narrow, wide = run_whole(method, rounded), run_whole(method, exact)
        for one in (narrow, wide):  # counts gates that are exactly 0, and a small one is in float32
            one.report = {name: mean for name, mean in one.report.items() if not name.endswith("/stopped")}
        narrow.gradients = {name: gradient.double() for name, gradient in narrow.gradients.items()}
        close(f"in {str(dtype).removeprefix('torch.')}", narrow, wide, tolerances.SINGLE)


def gradcheck(method: TokenObjective, case: Case) -> None:
    """The gradient is that of finite differences in float64, the anchor held fixed."""
    step = case.first
    batch = step.batch()
    plan = make_plan(method, [batch])
    anchor = PolicyOutputs(**step.live)

    def loss(live: Mapping[str, Tensor]) -> Tensor:
        return plan.loss(batch, PolicyOutputs(**live), anchor=anchor).loss

    check_slopes(loss, step.live, case.seed)


def detached(method: TokenObjective, case: Case) -> None:
    """No tensor in terms, statistics or state requires grad."""
    plan = make_plan(method, [batch := case.first.batch()])
    stat = plan.part(0).settled
    for place, one in [*leaves_of(plan.terms(batch)), *leaves_of(plan.state), *leaves_of(stat, "statistic")]:
        if isinstance(one, Tensor) and one.requires_grad:
            raise BrokenLaw(f"{place} requires grad; gradients live only in the functions of Terms.")


def masked(method: TokenObjective, case: Case) -> None:
    """Tokens that were dropped have a policy gradient of exactly zero."""
    step, mask = case.first, Dropping()
    batch = step.batch()
    objective = compose(method, mask)
    dropped = ~mask.chosen(batch)
    plan = make_plan(objective, [batch])
    keep = plan.terms(batch).keep
    assert keep is not None
    leaves = step.leaves()
    policy_part(plan, leaves)
    gradient = leaves["logprobs"].grad
    if gradient is not None and bool((gradient[~keep | dropped] != 0).any()):
        raise BrokenLaw("a dropped token has a policy gradient: the ratio of a kept token reads it.")


def live_ratio(method: TokenObjective, case: Case) -> None:
    """Where a batch says that the live policy is its own denominator, every ratio is 1."""
    if "ratio" not in method.writes:
        raise NotHere("the ratio is that of rlstab")
    batch = replace(case.first.batch(), live_ratio=True)
    plan = make_plan(method, [batch])
    with torch.no_grad():
        ratio = held_ratio(plan.part(0), PolicyOutputs(**case.first.live))
    if bool((ratio != 1).any()):
        raise BrokenLaw(
            f"`live_ratio` is set, and a ratio is {float(ratio[ratio != 1][0])!r}. Subtract "
            f"`constants.anchor.logprobs` there, not `batch.old_logprobs`: token_log_ratio(policy, constants.anchor, "
            "batch) does."
        )


def zero_advantage(method: TokenObjective, case: Case) -> None:
    """Without advantage the policy term has no gradient."""
    step = case.first.without_advantage()
    batch, leaves = step.batch(), step.leaves()
    plan = make_plan(method, [batch])
    policy_part(plan, leaves)
    gradient = leaves["logprobs"].grad
    if gradient is not None and bool((gradient != 0).any()):
        raise BrokenLaw("all advantages are 0 and the policy term still has a gradient.")


def limits(method: TokenObjective, case: Case) -> None:
    """Each method is the identity at each of its limits given by settings, whatever its other settings are."""
    limited = [
        one.at(leaf.method) for leaf in walk(method) for one in leaf.method.about.no_op_at if one.settings is not None
    ]
    if not limited:
        raise NotHere("it declares no settings at which it is the identity")
    base = run_whole(compose(), case.first)
    for other in limited:
        outcome = run_whole(other, case.first)
        outcome.report, outcome.state = base.report, base.state
        close(f"{other!r} against no method", base, outcome, 0.0)
