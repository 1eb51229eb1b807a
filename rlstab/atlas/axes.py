"""Scales, ticks and the frame around a panel."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlstab.atlas.svg import Drawing, Points

#: As typeset.
MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"
INK, QUIET, GRID, PLAIN = "#333333", "#6b6b6b", "#e6e6e6", "#9a9a9a"


@dataclass(frozen=True)
class Axis:
    """What is drawn along one side: its name with the unit, its range, and the ticks by value."""

    label: str
    low: float
    high: float
    ticks: Mapping[float, str] = field(default_factory=dict)
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; values beyond it stay beyond."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Frame:
    """The rectangle of a panel in pixels, with an axis on two sides."""

    left: float
    top: float
    width: float
    height: float
    x: Axis
    y: Axis

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point, which may be above or below the panel; NaN stays NaN."""
        return self.left + self.width * self.x.place(x), self.top + self.height * (1 - self.y.place(y))

    def inside(self, points: Points) -> list[tuple[float, float]]:
        """A line in pixels, cut where it leaves the panel upwards or downwards: there is NaN between its pieces."""
        pixels = [self.at(x, y) for x, y in points]
        low, high = self.top, self.top + self.height
        found = pixels[:1]
        for (x0, y0), (x1, y1) in itertools.pairwise(pixels):
            cuts = sorted((edge - y0) / (y1 - y0) for edge in (low, high) if (y0 - edge) * (y1 - edge) < 0)
            crossed = [(x0 + part * (x1 - x0), y0 + part * (y1 - y0)) for part in cuts]
            found += [*crossed, (x1, y1)]
        return [(x, y if low - 0.01 <= y <= high + 0.01 else math.nan) for x, y in found]

    def draw(self, on: Drawing, *, size: float = 12, labels: bool = True) -> None:
        """Grid, edge, ticks and, if asked, the names of the axes."""
        for value, text in self.x.ticks.items():
            across = self.at(value, self.y.low)[0]
            on.line([(across, self.top), (across, self.top + self.height)], GRID)
            on.text(across, self.top + self.height + 1.35 * size, text, size=size, fill=QUIET, anchor="middle")
        for value, text in self.y.ticks.items():
            up = self.at(self.x.low, value)[1]
            on.line([(self.left, up), (self.left + self.width, up)], GRID)
            on.text(self.left - 5, up + 0.35 * size, text, size=size, fill=QUIET, anchor="end")
        on.rectangle(self.left, self.top, self.width, self.height, "none", "#bdbdbd")
        if labels:
            on.text(
                self.left + self.width / 2, self.top + self.height + 2.8 * size, self.x.label, size=size, fill=INK,
                anchor="middle",
            )  # fmt: skip
            longest = max(map(len, self.y.ticks.values()), default=0)
            left = self.left - 14 - 0.55 * size * longest
            on.text(left, self.top + self.height / 2, self.y.label, size=size, fill=INK, anchor="middle", turned=True)


def round_axis(label: str, values: list[float], *, zero: bool = False) -> Axis:
    """A linear axis around some values, with three to six round ticks."""
    finite = [one for one in values if math.isfinite(one)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = low - abs(low or 1.0), high + abs(high or 1.0)
    rough = (high - low) / 4
    unit = 10 ** math.floor(math.log10(rough))
    step = unit * min((1, 2, 2.5, 5, 10), key=lambda one: abs(math.log(one * unit / rough)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = {one * step: f"{one * step:.6g}".replace("-", MINUS) for one in range(first, last + 1)}
    return Axis(label, first * step, last * step, ticks)
