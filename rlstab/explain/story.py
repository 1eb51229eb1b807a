"""What happens to a token, in words and in the order of the loss."""

from __future__ import annotations

from collections.abc import Mapping

from rlstab.config import RunConfig
from rlstab.core.compose import Composition
from rlstab.core.walk import Leaf, walk
from rlstab.explain.parts import parts
from rlstab.stages.grpo import GRPO

#: Fields of Terms in the order in which the loss uses them, and what happens to a token there.
STAGES: Mapping[str, str] = {
    "keep": "Drop",
    "bonus": "Change the advantage",
    "ratio": "Ratio",
    "bounds": "Trust region",
    "pull": "In place of the ratio",
    "exempt": "Exempt from the trust region",
    "gates": "Gate",
    "weight": "Weight",
    "aggregate": "Average",
    "penalties": "Penalty",
    "lr_scale": "Learning rate",
    "report": "Only observed",
}
_ADVANTAGES = {
    "grpo": "the reward of its response minus the mean of the group, divided by the group's standard deviation",
    "dr_grpo": "the reward of its response minus the mean of the group",
    "rloo": "the reward of its response minus the mean of the others in the group",
}
_RATIOS = {
    "live": "the live policy itself, so it is exactly 1 and only its gradient counts",
    "rollout": "the policy that sampled, as the sampler reported it",
    "recompute": "the policy that sampled, by one more forward of the trainer",
}


def story(objective: Composition, run: RunConfig | None, estimator: str | None) -> list[str]:
    """One numbered line for each thing that happens, in the order of the loss."""
    lines = []
    if estimator:
        own = run.pipeline.estimator if run else None
        epsilon = f" plus {own.epsilon}" if isinstance(own, GRPO) and estimator == "grpo" else ""
        words = _ADVANTAGES.get(estimator) or (own.in_words() if own else "")
        lines.append(f"**Advantage.** `{estimator}`: {words}{epsilon}. All tokens of a response share it.")
    if run:
        lines.append(f"**Ratio.** Against {_RATIOS[str(run.optimisation.old_logprobs)]}.")
    stated = {leaf.name for leaf in walk(objective)}
    for field, head in STAGES.items():
        told = [
            f"`{name}`{_among(leaf)}{'' if leaf.name in stated else ', the default'}: {text}"
            for name, leaf in parts(objective).items()
            if (text := leaf.method.in_words().get(field))
        ]
        lines += [f"**{head}.** {text}" for text in told or [_otherwise(field, objective)] if text]
    return [f"{number}. {line}" for number, line in enumerate(lines, 1)]


def _otherwise(field: str, objective: Composition) -> str:
    """What happens where nobody has a say; of a trust region, only where nothing takes its place."""
    if field == "keep":
        return "No token is dropped."
    elsewhere = any(one.writes & {"pull", "gates"} and "trust region" in one.addresses for one in objective.acting())
    if field != "bounds" or "pull" in objective.writes or elsewhere:
        return ""
    if "ratio" in objective.writes:
        return "Nothing beside the ratio: a token pulls with it times its advantage."
    return "None: a token pulls with its ratio times its advantage, however far the ratio has gone."


def _among(leaf: Leaf) -> str:
    kept = "` and `".join(one.name for one in leaf.around)
    return f", among the tokens that `{kept}` keeps" if kept else ""
