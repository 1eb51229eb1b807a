"""What does nothing: methods at their limits, settings that a run does not read; and what makes a run unsafe."""

from __future__ import annotations

from collections import Counter

from rlstab.config import RunConfig
from rlstab.config.runs import why_idle
from rlstab.core.compose import Composition, walk
from rlstab.core.objective import TokenObjective, active_methods
from rlstab.explain.stage_words import lacking
from rlstab.stages.grpo import GRPO

#: Of a method that writes nothing else, nothing is left to act where the ratio is 1.
_REGION = frozenset({"bounds", "gates", "surrogate", "ratio"})


def idle(objective: Composition, run: RunConfig | None) -> list[str]:
    """Methods that do nothing at their settings or in the run, and what makes the run unsafe."""
    found = [f"- **Warning:** {text}" for text in (unsafe(objective, run) + lacking(run.pipeline) if run else [])]
    if run:
        found += [f"- {text}" for text in idle_in_run(objective, run)]
    else:
        found += _with_several_steps(objective)
    found += [f"- {text}" for text in repeated(objective)]
    for leaf in walk(objective):
        reached = [one for one in leaf.method.about.no_op_at if one.settings and one.reached(leaf.method)]
        found += [f"- {leaf.method!r} does nothing: {one.why}" for one in reached[:1]]
    return found or ["Nothing is known to be idle or unsafe."]


def repeated(objective: Composition) -> list[str]:
    """Methods that are listed several times beside each other, each with what that means."""
    counts, found = Counter(one.name for one in objective.members), []
    for name, count in counts.items():
        if count > 1 and name != "within":
            own = [one for one in objective.members if one.name == name]
            same = "with the same settings" if all(one == own[0] for one in own) else "with different settings"
            found.append(f"{name} is listed {count} times {same}, and each acts. Remove one if that is not meant.")
    return found


def _with_several_steps(objective: Composition) -> list[str]:
    """Of an objective without a run: what only compares the live policy with the old one."""
    names = [_compares(f"`{key}`", one) for key, one in objective.keyed.items() if "live" in one.reads_drift]
    if not names:
        return []
    acts = f"{names[0]} acts" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} act"
    acts = acts[0].upper() + acts[1:]
    return [f"- {acts} only with several optimizer steps per rollout: with one the ratio is 1."]


def _compares(name: str, method: TokenObjective) -> str:
    """A method that compares the live policy with the old one, or only its trust region, where it writes more."""
    return f"the trust region of {name}" if method.writes - _REGION and method.writes & _REGION else name


def idle_in_run(objective: Composition, run: RunConfig) -> list[str]:
    """Methods and settings that cannot act in a run, each with the reason."""
    optimisation, found = run.optimisation, []
    one_step = optimisation.optimizer_steps_per_rollout == 1
    found += [
        f"{_compares(key, one) if drift == 'live' else key} cannot act: {why}"
        for key, one in objective.keyed.items()
        for drift in sorted(one.reads_drift)
        if (why := why_idle(drift, optimisation)) is not None
    ]
    if run.rollout.group == 1 and "even group" not in run.pipeline.estimator.about.exceptions:
        found.append(
            "rollout.group = 1: a response has nothing to be compared with, so every advantage is 0, and nothing but a "
            "penalty moves the policy."
        )
    if one_step and optimisation.refresh == "step" and optimisation.old_logprobs != "rollout":
        found.append(
            "optimisation.refresh = step: with one optimizer step per rollout the policy has not moved, and one more "
            "forward makes the same evidence again."
        )
    estimator = run.pipeline.estimator
    if isinstance(estimator, GRPO) and not estimator.std:
        found += [
            f"grpo.{name}: nothing is divided by a standard deviation, so it is not read."
            for name in ("epsilon", "ddof")
            if getattr(estimator, name) != getattr(GRPO(), name)
        ]
    return found


def unsafe(objective: Composition, run: RunConfig) -> list[str]:
    """What makes a run unsafe, each with the reason."""
    optimisation, found = run.optimisation, []
    steps = optimisation.optimizer_steps_per_rollout
    bound = any(
        one.writes & _REGION - {"ratio"} or "trust region" in one.about.addresses for one in active_methods(objective)
    )
    if steps > 1 and not bound:
        found.append(
            f"{steps} optimizer steps per rollout and no method with bounds, pull or gates: nothing stops a token "
            f"whose ratio has run away. Add clip_higher."
        )
    if optimisation.scope == "microbatch":
        found.append("optimisation.scope = microbatch: the loss depends on how the step is cut into micro-batches.")
    return found
