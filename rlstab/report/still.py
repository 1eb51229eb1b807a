"""Figures as SVG inside the page: what a reader sees before the script has drawn, or without it.

They take their colours and letters from the page, so one drawing serves both themes. They run over rollouts with an
interquartile band: what the controls begin with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from markupsafe import Markup, escape

from rlstab.atlas.axes import Axis, round_axis
from rlstab.atlas.svg import number, simplified
from rlstab.report.comparison import Comparison
from rlstab.report.curves import seeds_of
from rlstab.report.metric_names import axis
from rlstab.report.model import RunRecord
from rlstab.report.numbers import setting
from rlstab.report.outcomes import Outcome
from rlstab.report.palette import Look
from rlstab.report.sweep import Sweep

Point: TypeAlias = tuple[float, float]

#: Points per curve: enough at this size, and a page of many figures stays small.
POINTS = 60
#: Width and height of a drawing, in its own units.
USUAL, WIDE, SMALL = (460, 250), (760, 270), (330, 180)
_RIGHT, _TOP, _BELOW = 14, 10, 38
_DASHES = ("", "6 3", "2 2.5")


@dataclass(frozen=True)
class Shape:
    """One method in a figure; points that are not finite break its line.

    Attributes:
        look: its colour and dash.
        points: of its line.
        low, high: of its band; empty without one.
        dots: where a disc stands: its radius, and whether it is filled.
        bars: vertical intervals: x, low, high.
    """

    look: Look
    points: Sequence[Point]
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()
    dots: Sequence[tuple[Point, float, bool]] = ()
    bars: Sequence[tuple[float, float, float]] = field(default=())


def curve(
    methods: Mapping[str, Sequence[RunRecord]],
    looks: Mapping[str, Look],
    metric: str,
    *,
    log: bool = False,
    zero: bool = True,
    size: tuple[int, int] = USUAL,
) -> Markup | None:
    """A metric over rollouts: mean and interquartile band over seeds, on a logarithmic axis the median.

    Args:
        methods: runs of one setting, by method.
        looks: of the methods.
        metric: its name.
        log: of the vertical axis.
        zero: whether the vertical axis may begin at 0, where that is natural for the metric.
        size: of the drawing.

    Returns:
        the SVG; None where no method has anything to draw.
    """
    shapes = []
    for method, runs in methods.items():
        found = seeds_of(runs, metric, POINTS)
        if found is None:
            continue
        if log:
            found = replace(found, values=np.where(found.values > 0, found.values, np.nan))
        x = found.rollouts.tolist()
        middle = _pairs(x, found.median() if log else found.mean())
        if not middle:
            continue
        several = len(found.seeds) > 1
        low, high = (_pairs(x, found.quantile(share)) if several else () for share in (0.25, 0.75))
        sparse = metric.startswith("eval/") or len(middle) == 1
        shapes.append(Shape(looks[method], middle, low, high, [(one, 2.6, True) for one in middle] if sparse else ()))
    if not shapes:
        return None
    last = max((run.rollouts for runs in methods.values() for run in runs), default=0)
    across = _within("rollout", 0.0, 1.015 * max(last, 1))
    heights = [y for shape in shapes for some in (shape.points, shape.low, shape.high) for _, y in some]
    up = _log_axis("", heights) if log else round_axis("", heights, zero=zero and axis(metric).zero)
    return _drawn(shapes, across, up, size)


def trajectory(methods: Mapping[str, Sequence[RunRecord]], looks: Mapping[str, Look]) -> Markup | None:
    """Reward over entropy, a path per method with a disc at its end; None where there is none."""
    shapes = []
    for method, runs in methods.items():
        entropy, reward = (seeds_of(runs, name, POINTS) for name in ("tokens/entropy", "reward/mean"))
        if entropy is None or reward is None:
            continue
        _, first, second = np.intersect1d(entropy.rollouts, reward.rollouts, return_indices=True)
        pairs = zip(entropy.mean()[first].tolist(), reward.mean()[second].tolist(), strict=True)
        points = [one for one in pairs if all(map(math.isfinite, one))]
        if points:
            shapes.append(Shape(looks[method], points, dots=[(points[-1], 5, True)]))
    if not shapes:
        return None
    entropies, rewards = ([point[side] for shape in shapes for point in shape.points] for side in (0, 1))
    across, up = round_axis("entropy, nats per token", entropies), round_axis("training reward", rewards)
    return _drawn(shapes, across, up, WIDE)


def swept(comparison: Comparison, one: Sweep, outcome: Outcome, looks: Mapping[str, Look]) -> Markup | None:
    """An outcome over the swept setting: intervals, open discs where a method is not stable, a ring at the highest
    value at which it is; None where no run has the outcome.
    """
    tables = {(table.bench or "", table.setting): table for table in comparison.tables}
    shapes = []
    for method in [name for name in looks if name in one.highest]:
        points: list[Point] = []
        dots: list[tuple[Point, float, bool]] = []
        bars: list[tuple[float, float, float]] = []
        for point in [point for point in one.points if point.method == method]:
            size = tables[one.bench, point.setting].cells[method, outcome.name].summary
            if size.value is None:
                continue
            points.append((point.value, size.value))
            dots.append((points[-1], 3.6, point.stable))
            if size.low is not None and size.high is not None:
                bars.append((point.value, size.low, size.high))
            if point.value == one.highest[method]:
                dots.append((points[-1], 8, False))
        if points:
            shapes.append(Shape(looks[method], points, dots=dots, bars=bars))
    if not shapes:
        return None
    low, high = one.values[0], one.values[-1]
    log = low > 0 and high / low >= 4
    edge = (high / low) ** 0.05 if log else (high - low) / 20
    ends = (low / edge, high * edge) if log else (low - edge, high + edge)
    across = Axis(one.key, *ends, {value: setting(value) for value in one.values}, log)
    heights = [y for shape in shapes for _, y in shape.points] + [
        y for shape in shapes for _, *both in shape.bars for y in both
    ]
    return _drawn(shapes, across, round_axis(outcome.title, heights, zero=True), WIDE)


def _pairs(x: Sequence[float], y: Iterable[float]) -> list[Point]:
    return [(float(here), float(there)) for here, there in zip(x, y, strict=True) if math.isfinite(there)]


def _within(label: str, low: float, high: float) -> Axis:
    """A linear axis that ends where the values end, with the round ticks inside."""
    ticks = {value: text for value, text in round_axis(label, [low, high]).ticks.items() if low <= value <= high}
    return Axis(label, low, high, ticks)


def _log_axis(label: str, values: Sequence[float]) -> Axis:
    """A logarithmic axis from a little below to a little above, ticked at 1, 2 and 5, over many decades at 1 alone."""
    low, high = 0.9 * min(values), 1.1 * max(values)
    steps = (1, 2, 5) if high / low < 100 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = {step * 10.0**power: f"{step * 10.0**power:g}" for power in powers for step in steps}
    inside = {value: text for value, text in ticks.items() if low <= value <= high}
    if len(inside) < 2:  # less than from one round number to the next
        inside = {value: f"{value:.3g}" for value in (min(values), max(values))}
    return Axis(label, low, high, inside, log=True)


def _drawn(shapes: Sequence[Shape], across: Axis, up: Axis, size: tuple[int, int]) -> Markup:
    width, height = size
    left = 12 + 7 * max(map(len, up.ticks.values()), default=1) + (16 if up.label else 0)
    inner, deep = width - left - _RIGHT, height - _TOP - _BELOW

    def at(point: Point) -> Point:
        return left + inner * across.place(point[0]), _TOP + deep * (1 - up.place(point[1]))

    def path(points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in simplified([at(one) for one in points], 0.3))

    parts = [f'<svg class="drawing" viewBox="0 0 {width} {height}" aria-hidden="true">']
    for value, text in up.ticks.items():
        y = number(_TOP + deep * (1 - up.place(value)))
        parts.append(f'<path class="grid" d="M{left} {y}H{width - _RIGHT}"/>')
        parts.append(f'<text x="{left - 6}" y="{y}" dy=".32em" text-anchor="end">{escape(text)}</text>')
    parts.append(f'<path class="edge" d="M{left} {_TOP + deep}H{width - _RIGHT}"/>')
    for value, text in across.ticks.items():
        x = number(left + inner * across.place(value))
        parts.append(f'<text x="{x}" y="{_TOP + deep + 15}" text-anchor="middle">{escape(text)}</text>')
    middle = number(left + inner / 2)
    parts.append(f'<text x="{middle}" y="{height - 6}" text-anchor="middle">{escape(across.label)}</text>')
    if up.label:
        place = number(_TOP + deep / 2)
        turned = f'text-anchor="middle" transform="rotate(-90 11 {place})"'
        parts.append(f'<text x="11" y="{place}" dy=".32em" {turned}>{escape(up.label)}</text>')
    for shape in shapes:
        parts.append(f'<g style="color:var(--m{shape.look.colour})">')
        if shape.low and shape.high:
            parts.append(f'<path class="band" d="{path(shape.high)}{path(shape.low[::-1]).replace("M", "L", 1)}Z"/>')
        for here, low, high in shape.bars:
            (here_x, bottom), (_, top) = at((here, low)), at((here, high))
            parts.append(f'<path class="bar-line" d="M{number(here_x)} {number(bottom)}V{number(top)}"/>')
        dash = _DASHES[shape.look.dash]
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        if len(shape.points) > 1:
            parts.append(f'<path class="curve"{dashes} d="{path(shape.points)}"/>')
        for point, radius, filled in shape.dots:
            x, y = map(number, at(point))
            parts.append(f'<circle class="{"full" if filled else "open"}" cx="{x}" cy="{y}" r="{number(radius)}"/>')
        parts.append("</g>")
    return Markup("".join([*parts, "</svg>"]))
