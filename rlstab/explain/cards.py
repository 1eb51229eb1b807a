"""The pages of all methods, and their comparison, in a folder."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from pathlib import Path

from rlstab.core.batch import SIGNALS
from rlstab.core.settings import settings_of
from rlstab.core.walk import Leaf, walk
from rlstab.explain.card_page import MARK, markdown
from rlstab.explain.card_sections import BASICS, CardError, card
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


def pages() -> dict[str, str]:
    """File name to text: one page per method, and ``index.md``."""
    cards = [card(cls) for cls in shipped()]
    names = [one.cls.name for one in cards]
    found = {f"{one.cls.name}.md": markdown(one, names) for one in cards}
    head = f"{MARK}. -->\n\n# All methods\n\nOne page each, made from the class (`rlstab cards`)."
    return {**found, "index.md": f"{head}\n\n{comparison()}\n"}


def write(folder: str | Path) -> None:
    """Write all pages, and remove those that this function wrote before and that no method has any more.

    Raises:
        CardError: a class has no card, or the folder cannot be written.
    """
    folder, wanted = Path(folder), pages()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in wanted.items():
            (folder / name).write_text(text, encoding="utf-8", newline="\n")
        for name in _orphans(folder, wanted):
            (folder / name).unlink()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CardError(f"{folder}: cannot be written: {reason}. Give another folder.") from error


def stale(folder: str | Path) -> list[str]:
    """What is wrong with the pages in a folder, a line each; nothing when they say what the classes say.

    Raises:
        CardError: a class has no card.
    """
    folder, wanted = Path(folder), pages()
    found = []
    for name, text in wanted.items():
        page = folder / name
        if not page.is_file():
            found.append(f"{page}: is missing.")
            continue
        written = page.read_text(encoding="utf-8")
        if written != text:
            pairs = itertools.zip_longest(written.split("\n"), text.split("\n"), fillvalue="(nothing)")
            number, (has, should) = next(place for place in enumerate(pairs, 1) if place[1][0] != place[1][1])
            found.append(f"{page}:{number}: {_difference(has, should)}")
    return found + [f"{folder / name}: no method has this name any more." for name in _orphans(folder, wanted)]


def _difference(has: str, should: str) -> str:
    """Both lines around the first character in which they differ."""
    same = next(
        (i for i, (one, other) in enumerate(zip(has, should, strict=False)) if one != other),
        len(min(has, should, key=len)),
    )
    one, other = (
        ("..." if same > 30 else "") + line[max(0, same - 30) : same + 50] + ("..." if len(line) > same + 50 else "")
        for line in (has, should)
    )
    return f"the page says {one!r}, the class {other!r}."


def _orphans(folder: Path, wanted: Collection[str]) -> list[str]:
    others = [page for page in sorted(folder.glob("*.md")) if page.name not in wanted]
    return [page.name for page in others if page.read_text(encoding="utf-8").startswith(MARK)]
