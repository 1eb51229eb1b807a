"""``rlstab list``: methods by the source of instability that they address, stages by kind, presets, examples."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from rlstab.config.bundled_examples import examples
from rlstab.config.document import Kind
from rlstab.core.metadata import SOURCES, card, summary
from rlstab.core.method import Method
from rlstab.core.objective import TokenObjective
from rlstab.errors import UnknownName, plain
from rlstab.explain.stages import KINDS
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.zoo import METHODS


def listing(words: Sequence[str] = ()) -> RenderableType:
    """Each method and stage with its papers; presets and examples.

    Args:
        words: words that must all occur in the name, the text or the heading of an entry.

    Raises:
        UnknownName: no entry has all of them.
    """
    methods = [METHODS.get(name) for name in METHODS.names()]
    stages = [STAGES.get(name) for name in STAGES.names()]
    sections: list[tuple[str, list[tuple[str, str]]]] = []
    presets: list[tuple[str, str]] = []
    for source, about in {**SOURCES, "": "against none of these sources"}.items():
        rows = [_told(cls, _sources(cls)[1:]) for cls in methods if _sources(cls)[0] == source]
        sections.append((f"{source or 'others'}: {about}", rows))
    for kind, (_, about) in KINDS.items():
        rows = [_told(cls) for cls in stages if issubclass(cls, kind)]
        sections.append((f"stages: {kind.kind}: {about}", rows))
    for name, preset in PRESETS.items():
        parts = [*preset.objective.keyed, *(stage.name for stage in preset.stages)]
        presets.append((name, f"{preset.about} {', '.join(parts)}"))
    sections.append(("presets", presets))
    named = {kind: [name for name, example in examples().items() if example.kind == kind] for kind in get_args(Kind)}
    sections.append(("examples, for --example", [(kind, ", ".join(names)) for kind, names in named.items()]))
    matching = [
        (heading, [row for row in rows if all(word.lower() in f"{heading} {' '.join(row)}".lower() for word in words)])
        for heading, rows in sections
    ]
    if not any(rows for _, rows in matching):
        names = [name for _, rows in sections[:-1] for name, _ in rows]
        matches = [name for word in words for name in get_close_matches(plain(word), names, 1)]
        hint = f"Did you mean {' '.join(matches)}?" if matches else "Run `rlstab list` for all."
        raise UnknownName(f"no entry of the list has {' and '.join(map(repr, words))}. {hint}")
    return Group(*blocks(matching))


def blocks(sections: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> Iterator[RenderableType]:
    """A heading and a row for each name; a section without rows is left out."""
    for heading, rows in sections:
        if rows:
            table = Table.grid(padding=(0, 2))
            table.add_column(no_wrap=True)
            for name, text in rows:
                headline, _, facts = text.partition("\n")
                table.add_row(escape(name), escape(headline) + f"\n[dim]{escape(facts)}[/]" * bool(facts))
            yield f"[bold]{escape(heading)}[/]"
            yield Padding(table, (0, 0, 1, 2))


def _told(cls: type[Method[Any]], also: Sequence[str] = ()) -> tuple[str, str]:
    """The name; what the class does, and a second line with the other sources that it addresses and its papers."""
    facts = [f"also {', '.join(also)}"] * bool(also) + [f"arXiv {', '.join(card(cls).arxiv)}"] * bool(card(cls).arxiv)
    return cls.name, f"{summary(cls)}\n{' · '.join(facts)}"


def _sources(cls: type[TokenObjective]) -> list[str]:
    """The source under which it is listed, and the others that it addresses."""
    return [source for source in SOURCES if source in cls.about.addresses] or [""]
