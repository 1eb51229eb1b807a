"""Which recipe an objective is: a preset, or the nearest ones with every difference."""

from __future__ import annotations

from collections.abc import Mapping

from rlstab.core.compose import Composition, Leaf
from rlstab.core.settings import settings_of
from rlstab.explain.costs import listed
from rlstab.explain.parts import parts
from rlstab.presets import PRESETS, Preset
from rlstab.stages.grpo import GRPO
from rlstab.stages.pipeline import Pipeline

#: Presets that nobody published.
_OURS = ("recommended",)


def recipes(objective: Composition, pipeline: Pipeline | None) -> list[str]:
    """Whether it is a preset, else the nearest ones and every difference."""
    found = {name: differences(objective, pipeline, one) for name, one in PRESETS.items()}
    name, *others = _nearest(found)
    if found[name]:
        lines = [f"- Nearest: `{name}` ({PRESETS[name].about.rstrip('.')}). This one {'; '.join(found[name])}."]
    else:
        lines = [f"- Equals `{name}`: {PRESETS[name].about}"]
    if others:
        lines.append(f"- As near: {listed(others)}.")
    if name in _OURS:
        published, *others = _nearest({key: one for key, one in found.items() if key not in _OURS})
        about = PRESETS[published].about.rstrip(".")
        as_near = f" As near: {listed(others)}." if others else ""
        told = "; ".join(found[published])
        lines.append(f"- Nearest that is published: `{published}` ({about}). This one {told}.{as_near}")
    alone = f" An objective alone has no stages; for the advantage `{name}` takes `{PRESETS[name].estimator}`."
    return [
        *lines,
        f"- Compared are the loss and the stages; a preset records no model, data or schedule."
        f"{alone if pipeline is None else ''}",
    ]


def _nearest(found: Mapping[str, list[str]]) -> list[str]:
    least = min(map(_distance, found.values()))
    return [name for name, one in found.items() if _distance(one) == least]


def differences(objective: Composition, pipeline: Pipeline | None, recipe: Preset) -> list[str]:
    """What an objective lacks, adds and sets otherwise, as ends of a sentence; only settings that have an effect."""
    mine, theirs = parts(objective), parts(recipe.objective)
    found = [f"lacks `{name}`" for name in theirs if name not in mine]
    found += [f"adds `{name}`" for name in mine if name not in theirs]
    for name in mine.keys() & theirs.keys():
        one, other = mine[name].method, theirs[name].method
        if one.in_words() != other.in_words():
            settings = [(key.name, getattr(one, key.name), getattr(other, key.name)) for key in settings_of(type(one))]
            found += [f"sets `{name}.{key}` to {new} instead of {old}" for key, new, old in settings if new != old]
        place, other_place = _place(mine[name]), _place(theirs[name])
        if place != other_place:
            found.append(f"has `{name}` {place} instead of {other_place}")
    return sorted(found + (_other_stages(pipeline, recipe.pipeline) if pipeline else []))


def _other_stages(pipeline: Pipeline, theirs: Pipeline) -> list[str]:
    """What a run does outside the loss and a recipe does not, or otherwise; only settings that have an effect."""
    mine = {one.name: one for one in pipeline}
    wanted = {one.name: one for one in theirs}
    # of a kind that a run has once, one stands for the other
    found = [
        f"takes {what} `{one}` instead of `{other}`"
        for what, one, other in (
            ("the prompts of", pipeline.selector.name, theirs.selector.name),
            ("the advantage", estimator_of(pipeline), estimator_of(theirs)),
        )
        if one != other
    ]
    once = {pipeline.selector.name, pipeline.estimator.name, theirs.selector.name, theirs.estimator.name}
    found += [f"lacks the stage `{name}`" for name in wanted.keys() - mine.keys() - once]
    found += [f"adds the stage `{name}`" for name in mine.keys() - wanted.keys() - once]
    for name in mine.keys() & wanted.keys():
        one, other = mine[name], wanted[name]
        if one.in_words() != other.in_words() and not (name == "grpo" and estimator_of(pipeline) == "dr_grpo"):
            settings = [(key.name, getattr(one, key.name), getattr(other, key.name)) for key in settings_of(type(one))]
            found += [f"sets `{name}.{key}` to {new} instead of {old}" for key, new, old in settings if new != old]
    return found


def estimator_of(pipeline: Pipeline) -> str:
    """`grpo` without the standard deviation is `dr_grpo`."""
    estimator = pipeline.estimator
    return "dr_grpo" if isinstance(estimator, GRPO) and not estimator.std else estimator.name


def _place(leaf: Leaf) -> str:
    return f"within {listed(one.name for one in leaf.around)}" if leaf.around else "on all tokens"


def _distance(found: list[str]) -> int:
    """A method more or less weighs as much as three settings."""
    return sum(3 if one.startswith(("lacks", "adds")) else 1 for one in found)
