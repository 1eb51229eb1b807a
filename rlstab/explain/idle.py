"""What does nothing: methods at their limits, settings that a run does not read; and what makes a run unsafe."""

from __future__ import annotations

from rlstab.config import RunConfig
from rlstab.core.compose import Composition
from rlstab.core.walk import walk


def idle(objective: Composition, run: RunConfig | None) -> list[str]:
    """Methods that do nothing at their settings or in the run, and what makes the run unsafe."""
    found = [f"- **Warning:** {text}" for text in (unsafe(objective, run) if run else [])]
    if run:
        found += [f"- {text}" for text in inert(objective, run)]
    elif "bounds" in objective.writes:
        found.append("- The trust region acts only with several optimizer steps a rollout: with one the ratio is 1.")
    for leaf in walk(objective):
        reached = [one for one in leaf.method.limits if one.settings and one.reached(leaf.method)]
        found += [f"- {leaf.method!r} does nothing: {one.why}" for one in reached[:1]]
    return found or ["Nothing is known to be idle or unsafe."]


def inert(objective: Composition, run: RunConfig) -> list[str]:
    """Methods and settings that cannot act in a run, each with the reason."""
    optimisation, found = run.optimisation, []
    one_step = optimisation.steps_per_rollout == 1
    ratio = {"live": "the ratio is exactly 1", "recompute": "the ratio is 1 up to rounding"}
    if one_step and optimisation.old_logprobs in ratio:
        found += [
            f"{key if one.writes == {'bounds'} else f'the cap of the ratio by {key}'} cannot act: with one optimizer "
            f"step a rollout {ratio[optimisation.old_logprobs]}. It matters with epochs or mini_batches above 1."
            for key, one in objective.keyed.items()
            if "bounds" in one.writes
        ]
    if run.rollout.group == 1:
        found.append(
            "rollout.group = 1: a response has nothing to be compared with, so every advantage is 0, and nothing but a "
            "penalty moves the policy."
        )
    if one_step and optimisation.refresh == "step":
        found.append(
            "optimisation.refresh = step: with one optimizer step a rollout the policy has not moved, and one more "
            "forward makes the same evidence again."
        )
    advantage = run.advantage
    unread: tuple[str, ...] = () if advantage.std else ("epsilon", "ddof")
    if advantage.estimator != "grpo":
        unread = ("std", "epsilon", "ddof")
    return found + [
        f"advantage.{name}: nothing is divided by a standard deviation, so it is not read."
        for name in unread
        if getattr(advantage, name) != type(advantage).model_fields[name].default
    ]


def unsafe(objective: Composition, run: RunConfig) -> list[str]:
    """What makes a run unsafe, each with the reason."""
    optimisation, found = run.optimisation, []
    if optimisation.steps_per_rollout > 1 and "bounds" not in objective.writes and objective.trust_region:
        found.append(
            f"{optimisation.steps_per_rollout} optimizer steps a rollout and no method with bounds: nothing stops a "
            f"token whose ratio has run away. Add clip_higher."
        )
    if optimisation.scope == "microbatch":
        found.append("optimisation.scope = microbatch: the loss depends on how the step is cut into micro-batches.")
    return found
