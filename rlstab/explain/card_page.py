"""The page of a method: its card, and what it declares of its limits and of other methods, as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, get_args

from rlstab.core.compose import walk
from rlstab.core.metadata import MASK, Kind, NoOpAt
from rlstab.core.method import Method
from rlstab.core.objective import TokenObjective
from rlstab.core.settings import settings_of
from rlstab.core.terms import SLOTS
from rlstab.explain.card_sections import Card, Parameter
from rlstab.explain.card_sections import card as card_of
from rlstab.explain.exclusions import RIVALS, excludes, named, shipped, whom, writers
from rlstab.explain.interactions import TITLES
from rlstab.explain.markdown_text import body, inline, table
from rlstab.presets import PRESETS

#: How each page begins.
MARK = "<!-- Written by `rlstab cards` from the class"
_RUN_SETTINGS = (
    "Two settings of a run change what is measured here. `refresh: rollout | step`: the evidence is that of the policy "
    "that sampled, or is recomputed at the start of each optimizer step. `scope: step | microbatch`: statistics are "
    "taken over the whole optimizer step, or over each micro-batch alone, which only reproduces published code."
)


def markdown(card: Card[TokenObjective], beside: Collection[str] = (), picture: str = "") -> str:
    """The page of a card, in the Markdown of GitHub.

    Args:
        card: of any method, also of another package.
        beside: names of methods whose pages lie in the same folder; mentions of them become links.
        picture: Markdown that shows what the method does, to stand before the sections.
    """
    cls = card.cls
    module = "rlstab" if cls.__module__.startswith("rlstab.zoo.") else cls.__module__
    recipes = [f"`{name}`" for name, one in PRESETS.items() if cls.name in {leaf.name for leaf in walk(one.objective)}]
    beside = set(beside) - {cls.name}
    pieces = [
        f"{MARK}; edit {cls.__qualname__}. -->",
        f"# `{cls.name}` · `{cls.__qualname__}`",
        f"**{inline(card.summary, beside)}**",
        table(
            ["in Python", "in YAML", "in the presets"],
            [[f"`from {module} import {cls.__qualname__}`", f"`{yaml_of(cls)}`", ", ".join(recipes) or "none"]],
        ),
        *([picture] if picture else []),
    ]
    for name, text in card.sections.items():
        pieces.append(f"## {name}")
        if name == "Parameters" and card.parameters:
            pieces.append(parameters(card, beside))
        else:
            pieces += body(text, beside)
        if name == "Reads" and cls.measure is not TokenObjective.measure:
            pieces.append(_RUN_SETTINGS)
        if name == "Deviations":  # what the class declares stands between the sections of its docstring
            pieces += ["## Interacts", listed(_interacts(card, beside))]
            pieces += ["## Limits", listed(inline(_limit(cls, one), beside) for one in cls.about.no_op_at)]
            if cls.about.exceptions:
                pieces.append("Laws of `rlstab.testing` that it does not obey:")
                pieces.append(listed(f"*{law}*: {inline(why, beside)}" for law, why in cls.about.exceptions.items()))
    return "\n\n".join(pieces) + "\n"


def _interacts(card: Card[TokenObjective], beside: Collection[str]) -> list[str]:
    """Who has a slot that it has too, what it declares of others and others of it; what matters most first."""
    cls, writes = card.cls, set(card.heads("Writes"))
    mask = MASK if "keep" in writes else None
    found = [(one.kind, one.says(cls.name, *one.names)) for one in cls.about.interacts]
    rivals: dict[str, list[str]] = {}
    for other in shipped():
        if other is not cls:
            told = [one for one in other.about.interacts if {cls.name, mask} & set(one.names)]
            found += [(one.kind, one.says(other.name, cls.name)) for one in told]
            theirs = card_of(other).heads("Writes")
            for slot in (one for one in SLOTS if one in writes and one in theirs):
                rivals.setdefault(slot, []).append(other.name)
    found.sort(key=lambda one: get_args(Kind).index(one[0]))
    conflicts = [
        f"{named(names)} can define the {slot} as well; only one method of a composition may."
        for slot, names in rivals.items()
    ]
    for own, rival in (RIVALS, RIVALS[::-1]):
        if own in writes:
            conflicts.append(f"no method with {rival} beside it: {named(writers(rival))}. Both are trust regions.")
    conflicts += [f"{whom(key)}: {why}" for key, why in excludes(cls).items()]
    conflicts += [
        f"`{other.name}`: {excludes(other)[key]}"
        for other in shipped()
        for key in excludes(other)
        if other is not cls and (key == cls.name or key in writes)
    ]
    titled = [("Conflict", text) for text in conflicts]
    titled += [("Needs", f"{whom(key)}: {why}") for key, why in cls.requires.items()]
    titled += [("Published with", f"{whom(key)}: {why}") for key, why in cls.about.expects.items()]
    titled += [(TITLES[kind], text) for kind, text in found]
    return [f"**{title}:** {inline(text, beside)}" for title, text in titled]


def _limit(cls: type[TokenObjective], limit: NoOpAt) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in (limit.settings or {}).items())
    return f"``{cls.__name__}({settings})``: {limit.why}" if settings else limit.why


def listed(items: Iterable[str]) -> str:
    """Items as a list, or that there is none."""
    return "\n".join(f"- {one}" for one in items) or "none"


def parameters(card: Card[Any], beside: Collection[str]) -> str:
    """The settings as a table."""
    rows = [
        [f"`{one.name}`", inline(one.symbol), f"`{one.range}`", _default_cell(one), inline(one.source, beside)]
        for one in card.parameters
    ]
    return table(["name", "symbol", "range", "default", "meaning, and source of the default"], rows)


def yaml_of(cls: type[Method[Any]]) -> str:
    """How it is listed in a run file, with what has no default."""
    required = [one.name for one in settings_of(cls) if one.default is dataclasses.MISSING]
    return "{" + ", ".join([f"name: {cls.name}", *(f"{name}: ..." for name in required)]) + "}"


def _default_cell(parameter: Parameter) -> str:
    return "required" if parameter.default == "required" else f"`{parameter.default}`"
