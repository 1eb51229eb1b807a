"""A panel as data: lines and marks on two axes, and the colours that all panels share."""

from __future__ import annotations

from dataclasses import dataclass

from rlstab.atlas.axes import Axis
from rlstab.atlas.svg import Points

#: Of Okabe and Ito, whom the colour-blind can tell apart.
BLUE, SKY, ORANGE, VERMILION, GREEN, PURPLE = "#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#009e73", "#a0447f"
PALE_ORANGE, PALE_BLUE = "#f2cb6b", "#a9d6f0"
ALONE, GONE = "#c4c4c4", "#111111"
REWARDED, PUNISHED = BLUE, VERMILION
#: Of the first, second and third line of one colour.
DASHES = ("", "6 3", "1.5 2.5")


@dataclass(frozen=True)
class Line:
    """Through points, in the units of the axes; without a label it is not in the legend."""

    points: Points
    colour: str
    dash: str = ""
    width: float = 2.0
    label: str = ""


@dataclass(frozen=True)
class Marks:
    """A dot at each point."""

    points: Points
    colour: str
    size: float = 3.0
    label: str = ""


@dataclass(frozen=True)
class Panel:
    """What is drawn in one frame, in the order of the lists: what is listed last lies on top."""

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...] = ()
    marks: tuple[Marks, ...] = ()


@dataclass(frozen=True)
class Picture:
    """All panels of a method.

    Attributes:
        name: of the method.
        kind: heads its group in the gallery.
        settings: those that were chosen for it, in words.
        values: all settings with which it was made, or those words where there are many.
        caption: what is seen, and on what it was measured.
        panels: from left to right.
        small: how many of the first of them make the small picture of the gallery.
    """

    name: str
    kind: str
    settings: str
    values: str
    caption: str
    panels: tuple[Panel, ...]
    small: int = 1
