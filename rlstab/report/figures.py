"""The figures of a report as files: PNG to look at and SVG to print, of the same curves as the page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from numpy.typing import NDArray

from rlstab.report.comparison import Comparison
from rlstab.report.curves import LIGHT, Look, Seeds, looks_of, panels_of, seeds_of
from rlstab.report.formatting import axis, own_title, setting
from rlstab.report.output import writing
from rlstab.report.runs import RunRecord
from rlstab.report.statistics import NOT_MEASURED, Estimate
from rlstab.report.sweeps import Sweep
from rlstab.visible import visible

_DASHES: Any = ("-", (0, (6, 2.5)), (0, (1.5, 1.8)))
_MARKERS = "osD^X"


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
    several = len(comparison.tables) > 1
    with as_file(files("rlstab.report") / "figures.mplstyle") as style, mpl.rc_context(fname=style):
        for section, title, figure in _figures(comparison):
            stem = f"{section}-{_file_name(title)}".rstrip("-") if several else section
            while stem in {saved.path.stem for saved in written}:
                stem += "-again"
            for kind in ("png", "svg"):
                path = folder / f"{stem}.{kind}"
                with writing(path, "--out"):
                    # without a date, equal runs give equal files
                    figure.savefig(path, dpi=140, metadata={"Date": None} if kind == "svg" else None)
                written.append(Saved(path, section, title if several else ""))
    return written


def _figures(comparison: Comparison) -> Iterator[tuple[str, str, Figure]]:
    """Section, title of the setting, figure."""
    looks = looks_of(comparison)
    for table in comparison.tables:
        methods = _Methods(table.runs, looks)
        panels = panels_of(run for runs in table.runs.values() for run in runs)
        if panels.learning:
            yield "learning-curves", table.title, _grid(methods, panels.learning[:4], 2)
        if panels.trajectory:
            yield "entropy-and-reward", table.title, _trajectory(methods)
        if panels.gradients:
            yield "gradient-norms", table.title, _grid(methods, panels.gradients, 2, log=True)
        if own := [*panels.shares, *(name for names in panels.own.values() for name in names)]:
            yield "touched", table.title, _grid(methods, own, 3, touched=True)
    for sweep in comparison.sweeps:
        yield "sweep", sweep.bench, _sweep(comparison, sweep, _Methods({}, looks))


def _file_name(text: str) -> str:
    """Names of settings as a part of a file name: they may come from a results file, and hold anything."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", text).strip("-.")[:80]


def _name(text: str) -> str:
    return visible(text, spaces=False)


@dataclass(frozen=True)
class _Methods:
    """The runs of one setting by method, and how each method is drawn."""

    runs: Mapping[str, Sequence[RunRecord]]
    looks: Mapping[str, Look]

    def curves(self, metric: str) -> Iterator[tuple[str, Seeds, dict[str, Any]]]:
        """Name, curves and style of each method that has the metric."""
        for method, runs in self.runs.items():
            if (curves := seeds_of(runs, metric)) is not None:
                yield method, curves, self.style(method)

    def style(self, method: str) -> dict[str, Any]:
        """Colour and dash."""
        look = self.looks[method]
        return {"color": LIGHT[look.colour], "linestyle": _DASHES[look.dash]}

    def marker(self, method: str) -> str:
        """Of its points."""
        return _MARKERS[self.looks[method].marker]


def _curves(axes: Axes, methods: _Methods, metric: str, *, log: bool = False, touched: bool = False) -> None:
    """Mean over seeds with the interquartile band; on a logarithmic axis the median."""
    about, middles = axis(metric), []
    for method, curves, style in methods.curves(metric):
        if log:
            curves = replace(curves, values=np.where(curves.values > 0, curves.values, np.nan))
        middle = curves.over(np.median if log else np.mean)
        middles += middle[np.isfinite(middle)].tolist()
        marker = methods.marker(method) if metric.startswith("eval/") else None
        axes.plot(curves.rollouts, middle, **style, linewidth=1.6, marker=marker, markersize=3.5, label=_name(method))
        if len(curves.seeds) > 1:
            low, high = (curves.over(partial(np.quantile, q=share)) for share in (0.25, 0.75))
            axes.fill_between(curves.rollouts, low, high, color=style["color"], alpha=0.13, linewidth=0)
    axes.set(title=own_title(metric) if about.title == metric else about.title, xlabel="rollout")
    last = max((run.rollouts for runs in methods.runs.values() for run in runs), default=0)
    axes.set_xlim(0, 1.02 * max(last, 1))
    if not middles or (touched and not any(middles)):
        why = "0 throughout" if middles else "never recorded in half\nof the runs at once"
        axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", va="center", color="#5d5f63")
        axes.set_ylim(0, 1)
        axes.set_yticks([])
    elif log:
        axes.set_yscale("log")
        # the usual labels are mathematics, which is off for the sake of names
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(_Sparse(minor_thresholds=(2.0, 0.5)))
    elif about.zero:
        # a curve that is level lies on the edge otherwise
        axes.set_ylim(0, max(axes.get_ylim()[1], 1.06 * max(middles)))


class _Sparse(LogFormatter):
    """Labels between the powers of ten, only where an axis has few of these."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def _panels(count: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels; what is left of its grid stays empty."""
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows + 0.4), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid[count:]:
        axes.set_axis_off()
    return figure, grid[:count]


def _grid(
    methods: _Methods, metrics: Sequence[str], columns: int, *, log: bool = False, touched: bool = False
) -> Figure:
    figure, panels = _panels(len(metrics), columns, (4.6, 2.9) if columns < 3 else (3.1, 2.2))
    for axes, metric in zip(panels, metrics, strict=True):
        _curves(axes, methods, metric, log=log, touched=touched)
    # one legend for the whole figure: every method that is drawn in any part of it
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=min(len(handles), 8))
    return figure


def _trajectory(methods: _Methods) -> Figure:
    figure, [axes] = _panels(1, 1, (6.4, 4.2))
    for method, entropy, style in methods.curves("tokens/entropy"):
        reward = seeds_of(methods.runs[method], "reward/mean")
        if reward is None:
            continue
        _, across, up = np.intersect1d(entropy.rollouts, reward.rollouts, return_indices=True)
        x, y = _smooth(entropy.over(np.mean))[across], _smooth(reward.over(np.mean))[up]
        known = np.isfinite(x) & np.isfinite(y)
        if known.any():
            x, y = x[known], y[known]
            axes.plot(x, y, **style, linewidth=1.2, marker=".", markersize=3)
            axes.plot(x[-1], y[-1], methods.marker(method), color=style["color"], markersize=8, label=_name(method))
    axes.set(xlabel="entropy, nats per token", ylabel="training reward")
    axes.set_title("Training reward against entropy; large markers: end of training")
    axes.legend()
    return figure


def _smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each with its neighbours, as the page does: the path of a noisy reward cannot be followed otherwise."""
    known = np.isfinite(values)
    sums, counts = (np.convolve(row, np.ones(3), "same") for row in (np.where(known, values, 0.0), known))
    return np.where(known, sums / np.maximum(counts, 1), np.nan)


def _reach(estimate: Estimate) -> Any:
    """From the value to the ends of its interval."""
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return None
    return [[estimate.value - estimate.low], [estimate.high - estimate.value]]


def _sweep(comparison: Comparison, sweep: Sweep, methods: _Methods) -> Figure:
    """The main outcome over the swept key; open markers where not stable, a ring at the highest stable value."""
    tables = {(table.bench or "", table.setting): table for table in comparison.tables}
    figure, [axes] = _panels(1, 1, (6.8, 3.8))
    outcome = next(iter(comparison.outcomes), None)
    for name in [known for known in methods.looks if known in sweep.highest]:
        color, marker = methods.style(name)["color"], methods.marker(name)
        line = []
        for point in [point for point in sweep.points if point.method == name]:
            cells = tables[sweep.bench, point.setting].cells
            size = cells[name, outcome.name].summary if outcome else NOT_MEASURED
            if size.value is None:
                continue
            line.append((point.value, size.value))
            look = {"color": color, "marker": marker, "markerfacecolor": color if point.stable else "white"}
            axes.errorbar(point.value, size.value, yerr=_reach(size), elinewidth=1, markersize=6, zorder=3, **look)
            if point.value == sweep.highest[name]:
                axes.plot(point.value, size.value, "o", color=color, markerfacecolor="none", markersize=13)
        if line:
            axes.plot(*zip(*line, strict=True), **methods.style(name), linewidth=1.5, label=_name(name))
    if sweep.values[0] > 0:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_xticks(sweep.values, list(map(setting, sweep.values)))
    axes.set_ylim(bottom=0)
    axes.set(xlabel=visible(sweep.key), ylabel=outcome.title if outcome else "")
    axes.set_title("Open: not stable. Ring: highest stable value.")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return figure
