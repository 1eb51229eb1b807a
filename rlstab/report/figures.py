"""The figures of a report as files: PNG to look at and SVG to print, of the same curves as the page."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

from rlstab.errors import ReportError
from rlstab.report import palette
from rlstab.report.comparison import Comparison, Table
from rlstab.report.contents import looks_of
from rlstab.report.curves import Seeds, seeds_of
from rlstab.report.metric_names import axis, own_title
from rlstab.report.model import RunRecord
from rlstab.report.numbers import setting
from rlstab.report.outcomes import Outcome
from rlstab.report.overlap import Overlap
from rlstab.report.palette import Look
from rlstab.report.panels import panels_of
from rlstab.report.sweep import Sweep
from rlstab.visible import visible

#: Text stays text in SVG, names of runs are no mathematics, and equal runs give equal files.
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rlstab",
    "text.parse_math": False,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.formatter.useoffset": False,
    "axes.edgecolor": "#8a8a86",
    "legend.frameon": False,
}
_DASHES = {"solid": "-", "dash": (0, (6, 2.5)), "dot": (0, (1.5, 1.8))}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "cross": "X"}


@dataclass(frozen=True)
class Saved:
    """A figure in a file.

    Attributes:
        path: of the file, PNG or SVG.
        section: what it shows, such as ``learning-curves``.
        setting: title of the table whose methods it shows, empty where there is one table or it shows several.
    """

    path: Path
    section: str
    setting: str


def write(comparison: Comparison, out: Path) -> list[Saved]:
    """Write ``figures/NAME.png`` and ``.svg`` under ``out``, one of each for every setting where there are several.

    Returns:
        the figures, in the order of the page.

    Raises:
        ReportError: one cannot be written.
    """
    folder = out / "figures"
    written: list[Saved] = []
    taken = set[str]()
    several = len(comparison.tables) > 1
    with mpl.rc_context(STYLE):
        for section, title, figure in _figures(comparison):
            setting = title if several else ""
            name = _free(f"{section}-{_file_name(setting)}".rstrip("-"), taken)
            for kind in ("png", "svg"):
                path = folder / f"{name}.{kind}"
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    # without a date, equal runs give equal files
                    figure.savefig(path, dpi=140, metadata={"Date": None} if kind == "svg" else None)
                except OSError as error:
                    text = f"{path}: cannot be written: {error.strerror}. Give --out another folder."
                    raise ReportError(text) from error
                written.append(Saved(path, section, setting))
    return written


def _figures(comparison: Comparison) -> Iterator[tuple[str, str, Figure]]:
    """Section, title of the setting, figure."""
    looks = looks_of(comparison)
    for table in comparison.tables:
        methods = _Methods(table.runs, looks)
        panels = panels_of(run for runs in table.runs.values() for run in runs)
        if table.baseline is not None and len(table.methods) > 1 and comparison.outcomes:
            yield "differences", table.title, _differences(table, comparison.outcomes, methods)
        if panels.learning:
            yield "learning-curves", table.title, _grid(methods, panels.learning[:4], 2)
        if panels.trajectory:
            yield "entropy-and-reward", table.title, _trajectory(methods)
        if panels.gradients:
            yield "gradient-norms", table.title, _grid(methods, panels.gradients, 2, log=True)
        own = [*panels.shares, *(name for some in panels.own.values() for name in some)]
        if own:
            yield "touched", table.title, _grid(methods, own, 3, touched=True)
    for one in comparison.sweeps:
        yield "sweep", "", _sweep(comparison, one, _Methods({}, looks))
    for overlap in comparison.overlaps:
        yield "overlap", "", _overlap(overlap)


def _file_name(text: str) -> str:
    """Names of settings as a part of a file name: they may come from a results file, and hold anything."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.")[:80]


def _free(name: str, taken: set[str]) -> str:
    found = next(one for one in (name, *(f"{name}-{count}" for count in range(2, 10_000))) if one not in taken)
    taken.add(found)
    return found


@dataclass(frozen=True)
class _Methods:
    """The runs of one setting by method, and how each method is drawn."""

    runs: Mapping[str, Sequence[RunRecord]]
    looks: Mapping[str, Look]

    def curves(self, metric: str) -> Iterator[tuple[str, Seeds, dict[str, Any]]]:
        """Name, curves and style of each method that has the metric."""
        for method, runs in self.runs.items():
            found = seeds_of(runs, metric)
            if found is not None:
                yield method, found, self.style(method)

    def end(self) -> int:
        """Last rollout of the longest run."""
        return max((run.rollouts for runs in self.runs.values() for run in runs), default=0)

    def style(self, method: str) -> dict[str, Any]:
        """Colour and dash."""
        look = self.looks[method]
        return {"color": palette.LIGHT[look.colour], "linestyle": _DASHES[palette.DASHES[look.dash]]}

    def marker(self, method: str) -> str:
        """Of its points."""
        return _MARKERS[palette.MARKERS[self.looks[method].marker]]


def _curves(axes: Axes, methods: _Methods, metric: str, *, log: bool = False, touched: bool = False) -> None:
    """Mean over seeds with the interquartile band; on a logarithmic axis the median."""
    about, means = axis(metric), []
    for method, found, style in methods.curves(metric):
        if log:
            found = replace(found, values=np.where(found.values > 0, found.values, np.nan))
        middle = found.median() if log else found.mean()
        means += middle[np.isfinite(middle)].tolist()
        sampled = not metric.startswith("eval/")
        axes.plot(
            found.rollouts,
            middle,
            **style,
            linewidth=1.6,
            marker=None if sampled else methods.marker(method),
            markersize=3.5,
            label=visible(method, spaces=False),
        )
        if len(found.seeds) > 1:
            low, high = found.quantile(0.25), found.quantile(0.75)
            axes.fill_between(found.rollouts, low, high, color=style["color"], alpha=0.13, linewidth=0)
    axes.set(title=own_title(metric) if about.title == metric else about.title, xlabel="rollout")
    axes.set_xlim(0, 1.02 * max(methods.end(), 1))
    if not means or (touched and not any(means)):
        said = "0 throughout" if means else "never recorded in half\nof the runs at once"
        axes.text(0.5, 0.5, said, transform=axes.transAxes, ha="center", va="center", color="#5d5f63")
        axes.set_ylim(0, 1)
        axes.set_yticks([])
    elif log:
        axes.set_yscale("log")
        # the usual labels are mathematics, which is off for the sake of names
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(_Sparse(minor_thresholds=(2.0, 0.5)))
    elif about.zero:
        # a curve that is level lies on the edge otherwise
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.06 * max(means)))


class _Sparse(LogFormatter):
    """Labels between the powers of ten, only where an axis has few of these."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _grid(
    methods: _Methods, metrics: Sequence[str], columns: int, *, log: bool = False, touched: bool = False
) -> Figure:
    rows = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(4.6 * columns if columns < 3 else 9.2, (2.9 if columns < 3 else 2.2) * rows + 0.4))
    figure.set_layout_engine("constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, metric in zip(grid.flat, metrics, strict=False):
        _curves(axes, methods, metric, log=log, touched=touched)
    for axes in grid.flat[len(metrics) :]:
        axes.set_axis_off()
    _legend(figure, grid.flat)
    return figure


def _legend(figure: Figure, several: Iterable[Axes]) -> None:
    """One for the whole figure: every method that is drawn in any part of it."""
    handles = {
        label: handle for axes in several for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(len(handles), 8))


def _trajectory(methods: _Methods) -> Figure:
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    for method, entropy, style in methods.curves("tokens/entropy"):
        reward = seeds_of(methods.runs[method], "reward/mean")
        if reward is None:
            continue
        _, across, up = np.intersect1d(entropy.rollouts, reward.rollouts, return_indices=True)
        x, y = _smooth(entropy.mean())[across], _smooth(reward.mean())[up]
        there = np.isfinite(x) & np.isfinite(y)
        if there.any():
            axes.plot(x[there], y[there], **style, linewidth=1.2, marker=".", markersize=3)
            name = visible(method, spaces=False)
            axes.plot(
                x[there][-1], y[there][-1], methods.marker(method), color=style["color"], markersize=8, label=name
            )
    axes.set(xlabel="entropy, nats per token", ylabel="training reward")
    axes.set_title("Training reward against entropy; large markers: end of training")
    axes.legend(fontsize=8)
    return figure


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each with its neighbours, as the page does: the path of a noisy reward cannot be followed otherwise."""
    padded = np.pad(values, 1, constant_values=np.nan)
    near = np.stack([padded[:-2], padded[1:-1], padded[2:]])
    there = np.isfinite(near)
    means = np.where(there, near, 0.0).sum(axis=0) / np.maximum(there.sum(axis=0), 1)
    return np.where(np.isfinite(values), means, np.nan)


def _differences(table: Table, outcomes: Sequence[Outcome], methods: _Methods) -> Figure:
    """The paired differences with their intervals, an outcome per panel."""
    others = [name for name in table.methods if name != table.baseline]
    columns = min(len(outcomes), 3)
    rows = math.ceil(len(outcomes) / columns)
    figure = Figure(figsize=(3.2 * columns + 0.8, (0.26 * len(others) + 1.1) * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, outcome in zip(grid.flat, outcomes, strict=False):
        axes.axvline(0, color="#8a8a86", linewidth=0.9)
        for place, name in enumerate(others):
            paired = table.cells[name, outcome.name].paired
            if paired is None or paired.difference.value is None:
                across, box = axes.get_yaxis_transform(), {"facecolor": "white", "linewidth": 0, "pad": 1.5}
                axes.text(0.02, place, "no seed in both", transform=across, fontsize=8, va="center", bbox=box)
                continue
            size, color = paired.difference, methods.style(name)["color"]
            if size.low is not None and size.high is not None:
                axes.plot([size.low, size.high], [place, place], color=color, linewidth=1.8)
            axes.plot(size.value, place, methods.marker(name), color=color, markersize=7, markeredgecolor="white")
        axes.set(title=outcome.title + (f", {outcome.unit}" if outcome.unit else ""))
        axes.set_yticks(range(len(others)), [visible(name, spaces=False) for name in others])
        axes.set_ylim(len(others) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.locator_params(axis="x", nbins=5)
    for axes in grid.flat[len(outcomes) :]:
        axes.set_axis_off()
    figure.supxlabel(f"difference from {visible(str(table.baseline), spaces=False)}, paired by seed, 95 % intervals")
    return figure


def _sweep(comparison: Comparison, one: Sweep, methods: _Methods) -> Figure:
    """The main outcome over the swept key; open markers where not stable, a ring at the highest stable value."""
    tables = {(table.bench or "", table.setting): table for table in comparison.tables}
    outcome = comparison.outcomes[0] if comparison.outcomes else None
    figure = Figure(figsize=(6.8, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in [known for known in methods.looks if known in one.highest]:
        color, marker = methods.style(name)["color"], methods.marker(name)
        drawn = []
        for point in [point for point in one.points if point.method == name]:
            if outcome is None:
                break
            size = tables[one.bench, point.setting].cells[name, outcome.name].summary
            if size.value is None:
                continue
            drawn.append((point.value, size.value))
            if size.low is not None and size.high is not None:
                axes.plot([point.value] * 2, [size.low, size.high], color=color, linewidth=1)
            face = color if point.stable else "white"
            axes.plot(point.value, size.value, marker, color=color, markerfacecolor=face, markersize=6, zorder=3)
            if point.value == one.highest[name]:
                axes.plot(point.value, size.value, "o", color=color, markerfacecolor="none", markersize=13)
        if drawn:
            axes.plot(
                *zip(*drawn, strict=True), **methods.style(name), linewidth=1.5, label=visible(name, spaces=False)
            )
    if one.values[0] > 0:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(one.values, [setting(value) for value in one.values])
    axes.set_ylim(bottom=0)
    axes.set(xlabel=visible(one.key), ylabel=outcome.title if outcome else "")
    axes.set_title("Open: not stable. Ring: highest stable value.")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    return figure


def _overlap(one: Overlap) -> Figure:
    names = [visible(name, spaces=False) for name in one.names]
    side = 0.75 * len(names) + 2.6
    figure = Figure(figsize=(side, side + 0.4), layout="constrained")
    axes = figure.subplots()
    values = np.array([[np.nan if value is None else value for value in row] for row in one.matrix], dtype=np.float64)
    axes.imshow(values, cmap="Blues", vmin=0, vmax=1.4)
    for (row, column), value in np.ndenumerate(values):
        axes.text(column, row, f"{value:.2f}" if np.isfinite(value) else "none", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), [f"{name} ({count})" for name, count in zip(names, one.touched, strict=True)])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    where = ", ".join(part for part in (one.bench, one.setting) if part)
    text = f"Of the tokens that either method touched, the share that both touched. {where}: {one.compared}"
    wrapped = textwrap.wrap(visible(text, spaces=False), width=max(round(13 * side), 30))
    figure.suptitle("\n".join(wrapped), fontsize=8.5)
    return figure
