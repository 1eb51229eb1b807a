"""Which recipe an objective is: a preset, or the nearest ones with every difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlstab.core.compose import Composition, walk
from rlstab.core.objective import Leaf, TokenObjective
from rlstab.core.settings import settings_of
from rlstab.explain.costs import in_backticks
from rlstab.presets import PRESETS, Preset
from rlstab.stages.grpo import GRPO
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.stage import Stage
from rlstab.zoo.token_mean import TokenMean

#: Presets that nobody published.
_OURS = ("recommended",)


def parts(objective: TokenObjective) -> dict[str, Leaf]:
    """The methods of an objective by name, numbered where one occurs several times.

    A composition without an owner of the aggregation is a token mean, so that is one of its parts.
    """
    leaves = list(walk(objective))
    if "aggregate" not in objective.writes:
        leaves.append(Leaf(TokenMean()))
    several, seen = Counter(leaf.name for leaf in leaves), Counter[str]()
    named = {}
    for leaf in leaves:
        seen[leaf.name] += 1
        named[f"{leaf.name}_{seen[leaf.name]}" if several[leaf.name] > 1 else leaf.name] = leaf
    return named


def recipes(objective: Composition, pipeline: Pipeline | None) -> list[str]:
    """Whether it is a preset, else the nearest ones and every difference."""
    differing = {name: differences(objective, pipeline, recipe) for name, recipe in PRESETS.items()}

    def told(name: str) -> str:
        return f"`{name}` ({PRESETS[name].about.rstrip('.')}). This one {'; '.join(differing[name])}."

    name, *others = _nearest(differing)
    lines = [f"- Nearest: {told(name)}" if differing[name] else f"- Equals `{name}`: {PRESETS[name].about}"]
    if others:
        lines.append(f"- As near: {in_backticks(others)}.")
    if name in _OURS:
        published, *others = _nearest({key: ends for key, ends in differing.items() if key not in _OURS})
        as_near = f" As near: {in_backticks(others)}." if others else ""
        lines.append(f"- Nearest that is published: {told(published)}{as_near}")
    compared = "- Compared are the loss and the stages; a preset records no model, data or schedule."
    if pipeline is None:
        compared += f" An objective alone has no stages; for the advantage `{name}` takes `{PRESETS[name].estimator}`."
    return [*lines, compared]


def _nearest(differing: Mapping[str, list[str]]) -> list[str]:
    least = min(map(_distance, differing.values()))
    return [name for name, ends in differing.items() if _distance(ends) == least]


def differences(objective: Composition, pipeline: Pipeline | None, recipe: Preset) -> list[str]:
    """What an objective lacks, adds and sets otherwise, as ends of a sentence; only settings that have an effect."""
    mine, theirs = parts(objective), parts(recipe.objective)
    lines = [f"lacks `{name}`" for name in theirs if name not in mine]
    lines += [f"adds `{name}`" for name in mine if name not in theirs]
    for name in mine.keys() & theirs.keys():
        lines += _other_settings(name, mine[name].method, theirs[name].method)
        place, other_place = _place(mine[name]), _place(theirs[name])
        if place != other_place:
            lines.append(f"has `{name}` {place} instead of {other_place}")
    return sorted(lines + (_other_stages(pipeline, recipe.pipeline) if pipeline else []))


def _other_settings(name: str, method: TokenObjective | Stage, other: TokenObjective | Stage) -> list[str]:
    if method.in_words() == other.in_words():
        return []
    settings = [(key.name, getattr(method, key.name), getattr(other, key.name)) for key in settings_of(type(method))]
    return [f"sets `{name}.{key}` to {new} instead of {old}" for key, new, old in settings if new != old]


def _other_stages(pipeline: Pipeline, theirs: Pipeline) -> list[str]:
    """What a run does outside the loss and a recipe does not, or otherwise; only settings that have an effect."""
    mine, wanted = ({stage.name: stage for stage in stages} for stages in (pipeline, theirs))
    # of a kind that a run has once, its stage stands for that of the recipe
    once = (
        ("the prompts of", pipeline.selector.name, theirs.selector.name),
        ("the advantage", estimator_of(pipeline), estimator_of(theirs)),
    )
    lines = [f"takes {what} `{name}` instead of `{other}`" for what, name, other in once if name != other]
    several = {stage.name for stages in (pipeline, theirs) for stage in (*stages.shapers, *stages.expanders)}
    lines += [f"lacks the stage `{name}`" for name in wanted if name in several and name not in mine]
    lines += [f"adds the stage `{name}`" for name in mine if name in several and name not in wanted]
    for name in mine.keys() & wanted.keys():
        if not (name == "grpo" and estimator_of(pipeline) == "dr_grpo"):
            lines += _other_settings(name, mine[name], wanted[name])
    return lines


def estimator_of(pipeline: Pipeline) -> str:
    """`grpo` without the standard deviation is `dr_grpo`."""
    estimator = pipeline.estimator
    return "dr_grpo" if isinstance(estimator, GRPO) and not estimator.std else estimator.name


def _place(leaf: Leaf) -> str:
    return f"within {in_backticks(outer.name for outer in leaf.around)}" if leaf.around else "on all tokens"


def _distance(ends: list[str]) -> int:
    """A method more or less weighs as much as three settings."""
    return sum(3 if end.startswith(("lacks", "adds")) else 1 for end in ends)
