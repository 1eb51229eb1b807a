"""From panels to SVG: the large picture of a card and the small one of the gallery."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import replace

from rlstab.atlas.axes import INK, QUIET, Frame
from rlstab.atlas.panel import Line, Marks, Panel, Picture
from rlstab.atlas.svg import Drawing

NOTE = "Written by `rlstab cards`"
#: Pixels of the large picture, whose height follows from the legends, and of one of its panels.
WIDTH, PANEL = 800, 290
_LEFT, _RIGHT, _GAP, _TOP, _BELOW = 64, 14, 66, 62, 58
#: Pixels and letters of a line of a legend, and the width of a panel that has its legend beside it.
_LEADING, _SINGLE = 17, 460
#: Pixels of the small picture.
SMALL_WIDTH, SMALL_HEIGHT = 256, 176


def large(picture: Picture) -> str:
    """The panels side by side, each with its legend below; the legend of a single one is beside it."""
    count = len(picture.panels)
    beside = count == 1
    width = _SINGLE if beside else (WIDTH - _LEFT - _RIGHT - _GAP * (count - 1)) / count
    letters = int((WIDTH - _LEFT - _SINGLE - 70 if beside else width - 32) / 6)
    legends = [_entries(panel, letters) for panel in picture.panels]
    lines = 0 if beside else max(sum(len(said) for _, said in one) for one in legends)
    on = Drawing(WIDTH, _TOP + PANEL + _BELOW + _LEADING * lines, f"{picture.name}: {picture.caption}")
    on.text(_LEFT, 22, picture.name, size=15, fill=INK, bold=True)
    on.text(WIDTH - _RIGHT, 22, picture.settings, size=11.5, fill=QUIET, anchor="end")
    for place, (panel, entries) in enumerate(zip(picture.panels, legends, strict=True)):
        frame = Frame(_LEFT + place * (width + _GAP), _TOP, width, PANEL, panel.x, panel.y)
        on.text(frame.left, _TOP - 10, panel.title, size=13, fill=INK)
        frame.draw(on)
        _fill(on, frame, panel)
        y = _TOP + 12.0 if beside else _TOP + PANEL + _BELOW
        for entry, said in entries:
            _legend(on, frame.left + (width + 20 if beside else 0), y, entry, said)
            y += _LEADING * len(said)
    return on.svg(NOTE)


def small(picture: Picture) -> str:
    """The first panels without words: their axes are those of the group."""
    on = Drawing(SMALL_WIDTH, SMALL_HEIGHT, picture.name)
    on.text(8, 18, picture.name, size=14, fill=INK, bold=True)
    panels = picture.panels[: picture.small]
    ups = [_few(panels[0].y.ticks, 3), *({} for _ in panels[1:])]
    left, gap = 14 + 6 * max(map(len, ups[0].values()), default=0), 16
    width = (SMALL_WIDTH - left - 10 - gap * (len(panels) - 1)) / len(panels)
    for place, (panel, up) in enumerate(zip(panels, ups, strict=True)):
        x = replace(panel.x, ticks=_few(panel.x.ticks, 3))
        frame = Frame(left + place * (width + gap), 28, width, SMALL_HEIGHT - 52, x, replace(panel.y, ticks=up))
        frame.draw(on, size=10.5, labels=False)
        _fill(on, frame, panel, scale=0.75)
    return on.svg(NOTE)


def _few(ticks: Mapping[float, str], most: int) -> dict[float, str]:
    """At most so many of the ticks, evenly, the first among them."""
    return dict(list(ticks.items())[:: max(1, -(-(len(ticks) - 1) // (most - 1)))])


def _fill(on: Drawing, frame: Frame, panel: Panel, scale: float = 1.0) -> None:
    for one in panel.lines:
        on.line(frame.inside(one.points), one.colour, max(1.0, one.width * scale), one.dash)
    for marks in panel.marks:
        on.dots([frame.at(x, y) for x, y in marks.points], marks.colour, marks.size * scale)


def _entries(panel: Panel, letters: int) -> list[tuple[Line | Marks, list[str]]]:
    """What the legend names, and how in lines of so many letters."""
    shapes: tuple[Line | Marks, ...] = (*panel.lines, *panel.marks)
    return [(one, textwrap.wrap(one.label, letters)) for one in shapes if one.label]


def _legend(on: Drawing, x: float, y: float, entry: Line | Marks, said: list[str]) -> None:
    if isinstance(entry, Line):
        on.line([(x, y - 4), (x + 24, y - 4)], entry.colour, entry.width, entry.dash)
    else:
        on.dots([(x + 12, y - 4)], entry.colour, 1.5 * entry.size)
    for number, line in enumerate(said):
        on.text(x + 32, y + _LEADING * number, line, size=12, fill=INK)
