"""The map: which source of instability a method is against, by where it acts; and what each reads, keeps and costs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rlstab.core.metadata import SOURCES
from rlstab.core.objective import TokenObjective
from rlstab.explain.card_page import MARK
from rlstab.explain.card_sections import BASICS, Card, card
from rlstab.explain.costs import beyond_free
from rlstab.explain.markdown_text import table

#: Where a method acts, by the fields of Terms that it fills; one that fills none reports a number of the step.
PLACES: Mapping[str, frozenset[str]] = {
    "ratio and trust region": frozenset({"ratio", "bounds", "surrogate", "gates"}),
    "which tokens count": frozenset({"keep", "weight", "unclipped"}),
    "advantage": frozenset({"bonus"}),
    "penalty": frozenset({"penalties"}),
    "divisor": frozenset({"aggregate"}),
    "whole step": frozenset({"lr_scale"}),
}
_HEAD = """# Map

Down: the source of instability that a method is against. Across: where it acts. One that is against several sources
stands in several rows, one that fills several fields in several columns."""


def source_map(methods: Sequence[TokenObjective]) -> str:
    """The page, of methods at the settings with which they are drawn."""
    cards = {method.name: card(type(method)) for method in methods}
    rows = []
    for source, about in {**SOURCES, "": "none of these"}.items():
        here = [one for one in methods if source in one.about.addresses or not (source or one.about.addresses)]
        if here:
            rows.append([f"**{source or about}**", *(_cell(place, here, cards) for place in PLACES)])
    listed = [_row(method, cards[method.name]) for method in methods]
    pieces = [
        f"{MARK}es. -->",
        _HEAD,
        table(["source", *PLACES], rows),
        "\n".join(f"- **{source}**: {about}" for source, about in SOURCES.items()),
        "## What each needs",
        "Beyond plain GRPO, in rlstab's trainer. A method reads what is listed under any of its settings, and "
        "costs what is listed at those of its picture. [All methods](index.md) says what the signals are.",
        table(["method", "fills", "reads", "state", "costs", "arXiv"], listed),
    ]
    return "\n\n".join(pieces) + "\n"


def _cell(place: str, methods: Sequence[TokenObjective], cards: Mapping[str, Card[TokenObjective]]) -> str:
    here = []
    for one in methods:
        fills = set(cards[one.name].heads("Writes"))
        if PLACES[place] & fills or (place == "whole step" and not fills):
            here.append(f"[`{one.name}`]({one.name}.md)")
    return "<br>".join(here)


def _row(method: TokenObjective, known: Card[TokenObjective]) -> list[str]:
    beyond = [name for name in known.heads("Reads") if name not in BASICS]
    numbers = dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{5})", known.sections["Source"]))
    return [
        f"[`{method.name}`]({method.name}.md)",
        ", ".join(f"`{name}`" for name in known.heads("Writes")) or "a report",
        ", ".join(f"`{name}`" for name in beyond) or "the basics",
        ", ".join(f"`{name}`" for name in known.heads("State")) or "none",
        "; ".join(beyond_free(method)) or "nothing",
        ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in numbers),
    ]
