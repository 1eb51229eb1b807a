"""What the methods of an objective do to each other: what their classes declare, found in a composition."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import get_args

from rlstab.core.compose import Composition, walk
from rlstab.core.metadata import Kind
from rlstab.core.objective import TokenObjective, active_methods, unmet
from rlstab.explain import stage_words
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.pipeline import unmet as stages_unmet

#: What a kind is called, on a card and by ``rlstab explain``.
TITLES: Mapping[Kind, str] = {
    "conflicts": "Against each other",
    "redundant": "Little left to do",
    "note": "Good to know",
    "good": "Good together",
}


def interactions(objective: TokenObjective) -> list[tuple[Kind, str]]:
    """Kind and sentence, names in backticks, those that matter most first."""
    leaves = list(walk(objective))
    found = {
        (declared.kind, declared.says(own.name, other.name)): None
        for own in leaves
        for declared in own.method.about.interacts
        for other in leaves
        if other is not own and declared.holds(own.method, other.method) and (declared.nested or not own.nested(other))
    }
    return sorted(found, key=lambda item: get_args(Kind).index(item[0]))


def pairs(objective: Composition, pipeline: Pipeline | None = None) -> list[str]:
    """The same as lines of Markdown, and what the stages of a run say of methods and of each other."""
    missing = unmet(objective) + (
        stages_unmet(pipeline, [one.name for one in active_methods(objective)]) if pipeline else []
    )
    found = [f"- **Not as published:** {text}" for text in map(_in_backticks, missing)]
    found += [f"- **Excluded:** {text}" for text in (stage_words.excluded(pipeline) if pipeline else [])]
    found += [f"- **{TITLES[kind]}:** {text}" for kind, text in interactions(objective)]
    return found or ["Nothing is known."]


def _in_backticks(text: str) -> str:
    """Names, which errors and warnings have in quotes."""
    return re.sub(r"'(\w+)'", r"`\1`", text)
