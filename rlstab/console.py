"""A terminal on which text from files and models cannot act."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rlstab.visible import visible


class Terminal(Console):
    """A console that shows control characters, whatever they came with: names, paths, errors, completions.

    Colours and the movements of a progress bar are rich's own and stay.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for one in super().render(renderable, options):
            yield one if one.control else Segment(visible(one.text, spaces=False), one.style)
