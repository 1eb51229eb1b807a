"""The pages of all methods, and their comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlstab.core.batch import SIGNALS
from rlstab.core.compose import Leaf, walk
from rlstab.core.settings import settings_of
from rlstab.explain.card_page import MARK, markdown
from rlstab.explain.card_sections import BASICS, card
from rlstab.explain.exclusions import exclusions, shipped
from rlstab.explain.markdown_text import inline, table
from rlstab.presets import PRESETS


def comparison() -> str:
    """All methods side by side, which of them exclude each other, and what each preset sets."""
    cards = [card(cls) for cls in shipped()]
    names = {one.cls.name for one in cards}
    rows = []
    for one in cards:
        arxiv = dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{5})", one.sections["Source"]))
        beyond = [name for name in one.heads("Reads") if name not in BASICS]
        reads = [f"live `{name.removeprefix('live ')}`" if "live " in name else f"`{name}`" for name in beyond]
        rows.append(
            [
                f"[`{one.cls.name}`]({one.cls.name}.md)",
                inline(one.summary, names - {one.cls.name}),
                ", ".join(f"`{name}`" for name in one.heads("Writes")),
                ", ".join(reads) or "none",
                " or ".join(one.denominators),
                ", ".join(f"`{key}`" for key in one.heads("State")) or "none",
                ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in arxiv),
            ]
        )
    header = ["method", "what it does to tokens", "writes", "reads beyond the basics", "denominator", "state", "arXiv"]
    signals = "\n".join(f"- `{name}`: {what}" for name, what in SIGNALS.items())
    return "\n\n".join(
        [
            "## Methods",
            "The basics are the log-probs of the sampled tokens, their advantages, and which response they belong to. "
            "A method reads what is listed under any of its settings; the page of each says which.",
            table(header, rows),
            f"The signals beyond the basics; live means that a penalty differentiates it:\n\n{signals}",
            "## What cannot be composed",
            "Every other pair composes, in any order; tests compose each pair, or see it refused. What composes and "
            "may surprise is on the page of each method, under *Interacts*.",
            "\n".join(f"- **{inline(what, names)}:** {inline(why, names)}" for what, why in exclusions()),
            "## Presets",
            "With every setting. The source of each value is in `rlstab/presets`.",
            _presets(),
        ]
    )


def _presets() -> str:
    """A row for each preset, and a line in it for each method."""
    rows = [
        [f"`{name}`", inline(one.about), f"`{one.estimator}`", "<br>".join(map(_placed, walk(one.objective)))]
        for name, one in PRESETS.items()
    ]
    return table(["preset", "what it is", "advantage", "methods"], rows)


def _placed(leaf: Leaf) -> str:
    """A method with its settings, and where it acts."""
    settings = ", ".join(f"`{one.name}` {getattr(leaf.method, one.name)}" for one in settings_of(type(leaf.method)))
    place = f" within {', '.join(f'`{one.name}`' for one in leaf.around)}" if leaf.around else ""
    return f"[`{leaf.name}`]({leaf.name}.md){place}{': ' if settings else ''}{settings}"


def pages(pictures: Mapping[str, str]) -> dict[str, str]:
    """File name to text: one page per method, and ``index.md``.

    Args:
        pictures: Markdown by name of the method that shows what it does.
    """
    cards = [card(cls) for cls in shipped()]
    names = [one.cls.name for one in cards]
    found = {f"{one.cls.name}.md": markdown(one, names, pictures.get(one.cls.name, "")) for one in cards}
    head = (
        f"{MARK}. -->\n\n# All methods\n\nOne page each, made from the class (`rlstab cards`). The "
        f"[gallery](gallery.md) shows what each does to tokens; the [map](map.md), which source of instability it is "
        f"against, where it acts and what it costs."
    )
    return {**found, "index.md": f"{head}\n\n{comparison()}\n"}
