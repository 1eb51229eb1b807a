"""What happens to a token, in words and in the order of the loss."""

from __future__ import annotations

from collections.abc import Mapping

from rlstab.config import RunConfig
from rlstab.core.compose import Composition, Leaf, walk
from rlstab.core.objective import active_methods
from rlstab.explain.parts import parts
from rlstab.stages.pipeline import Pipeline

#: Fields of Terms in the order in which the loss uses them, and what happens to a token there.
STAGES: Mapping[str, str] = {
    "keep": "Drop",
    "bonus": "Change the advantage",
    "ratio": "Ratio",
    "bounds": "Trust region",
    "surrogate": "In place of the ratio",
    "unclipped": "Exempt from the trust region",
    "gates": "Gate",
    "weight": "Weight",
    "aggregate": "Average",
    "penalties": "Penalty",
    "lr_scale": "Learning rate",
    "report": "Only observed",
}
_RATIOS = {
    "live": "the live policy itself, so it is exactly 1 and only its gradient counts",
    "rollout": "the policy that sampled, as the sampler reported it",
    "recompute": "the policy that sampled, by one more forward of the trainer",
}


def story(objective: Composition, run: RunConfig | None, pipeline: Pipeline | None) -> list[str]:
    """One numbered line for each thing that happens, in the order of the loss."""
    lines = []
    if pipeline:
        estimator = pipeline.estimator
        share = "block" if "block_ids" in estimator.needs else "response"
        lines.append(f"**Advantage.** `{estimator.name}`: that of its {share}, all tokens of which share it.")
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
    elsewhere = any(
        one.writes & {"surrogate", "gates"} and "trust region" in one.about.addresses
        for one in active_methods(objective)
    )
    if field != "bounds" or "surrogate" in objective.writes or elsewhere:
        return ""
    if "ratio" in objective.writes:
        return "Nothing beside the ratio: a token pulls with it times its advantage."
    return "None: a token pulls with its ratio times its advantage, however far the ratio has gone."


def _among(leaf: Leaf) -> str:
    kept = "` and `".join(one.name for one in leaf.around)
    return f", among the tokens that `{kept}` keeps" if kept else ""
