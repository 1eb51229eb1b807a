"""A card: the docstring of a method or a stage, read as sections. ``docs/hooks/pages.py`` makes its page from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rlstab.core.metadata import docstring


@dataclass(frozen=True)
class Card:
    """A docstring, read. Make one with :func:`card`.

    Attributes:
        summary: what the class does, one line.
        sections: text by title, dedented.
    """

    summary: str
    sections: Mapping[str, str]

    def items(self, section: str) -> list[str]:
        """The ``- `` items of a section, each on one line; none without such a section."""
        text = self.sections.get(section, "")
        return [" ".join(item.split()) for item in re.split(r"^- ", text, flags=re.MULTILINE)[1:]]

    def heads(self, section: str) -> list[str]:
        """The text in double backticks at the start of each item, with a ``live`` before it."""
        starts = (re.match(r"((?:live )?)``([^`]+)``", item) for item in self.items(section))
        return [start[1] + start[2] for start in starts if start]

    @property
    def parameters(self) -> Mapping[str, str]:
        """Each setting: its range, its default, its meaning and the source of the default."""
        items = (re.match(r"``(\w+)``(?: \([^)]+\))?: (.+)", item) for item in self.items("Parameters"))
        return {item[1]: item[2] for item in items if item}

    @property
    def arxiv(self) -> list[str]:
        """Numbers of the papers in the section Source."""
        return list(dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{5})", self.sections.get("Source", ""))))


def card(cls: type) -> Card:
    """The card of a class; without sections if its docstring has none."""
    titled = re.split(r"(?m)^([A-Z]\w+):\n", docstring(cls))
    texts = (re.sub(r"(?m)^    ", "", text).strip("\n") for text in titled[2::2])
    return Card(titled[0].strip(), dict(zip(titled[1::2], texts, strict=True)))
