"""Curves of many runs on common grids, which the page and the saved figures draw, and the look of each method."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstab.bins import WIDTH
from rlstab.report.collapse import collapsed
from rlstab.report.comparison import AREA, DERIVED, Comparison
from rlstab.report.formatting import METRICS, significant
from rlstab.report.runs import RunRecord, curve

#: Most numbers in all curves together, about 7 bytes each in the page.
BUDGET = 320_000
#: More points than the first add nothing at the width of a figure; fewer than the second show no shape.
POINTS, FEWEST = 120, 24
#: Significant digits of a value: with four, shares near 1, such as the kept tokens, would look like steps.
DIGITS = 6
#: Quartiles of the seeds, and their mean.
BAND = ("low", "mean", "high")
#: With fewer evaluations than this, the training curve shows more.
FEWEST_EVALUATIONS = 3

#: One look per method in every figure: hues that colour-blind readers tell apart (Okabe and Ito), the baseline in grey.
#: Yellow and black are left out: one is lost on paper, the other is text. Darker, or lighter, than published: at
#: least 3:1 against the page. With more methods than hues, hues repeat with another dash.
LIGHT = ("#5d5f63", "#0072b2", "#d55e00", "#008f68", "#bb5b94", "#b57d00", "#2f93d2")
DARK = ("#b9b8b3", "#3b92d6", "#f0793a", "#2cbf95", "#e39ac4", "#e6a822", "#8fd3fa")
DASHES, MARKERS = 3, 5


def line_styles(comparison: Comparison) -> dict[str, dict[str, int]]:
    """Every compared method with its look, in the order of the tables, a baseline first.

    A look has indices: ``colour`` into ``LIGHT`` and ``DARK``, ``dash`` and ``marker`` into those of each figure.
    """
    methods = list(dict.fromkeys(method for table in comparison.tables for method in table.methods))
    baselines = [table.baseline for table in comparison.tables if table.baseline is not None]
    # with several baselines none is neutral in all figures, so the most frequent one is grey
    baseline = max(baselines, key=baselines.count) if baselines else None
    looks = {baseline: {"colour": 0, "dash": 0, "marker": 0}} if baseline is not None else {}
    hues = len(LIGHT) - 1
    for index, name in enumerate(method for method in methods if method != baseline):
        dash, marker = index // hues % DASHES, (index + 1) % MARKERS
        looks[name] = {"colour": 1 + index % hues, "dash": dash, "marker": marker}
    return looks


@dataclass(frozen=True)
class Seeds:
    """One metric of one method in one setting.

    Attributes:
        rollouts: ``(n,)``.
        values: ``(seeds, n)``; NaN where a run has none.
        seeds: the seed of each row.
    """

    rollouts: NDArray[np.int64]
    values: NDArray[np.float64]
    seeds: tuple[int, ...]

    @property
    def means(self) -> NDArray[np.float64]:
        """``(n,)`` means over the seeds; NaN where fewer than half of them have a value."""
        means: NDArray[np.float64] = self.band(np.full(len(self.seeds), True))[1]
        return means

    def band(self, included: NDArray[np.bool_], is_norm: bool = False) -> NDArray[np.float64]:
        """``(3, n)``: quartiles over some seeds, and their mean between them; NaN likewise.

        In the middle of a norm is its median, since one spike would dominate a mean.
        """
        values = self.values[included]
        enough = 2 * np.isfinite(values).sum(0) >= len(values)
        band = np.full((3, values.shape[1]), np.nan)
        band[:, enough] = np.nanquantile(values[:, enough], (0.25, 0.5, 0.75), axis=0)
        if not is_norm:
            band[1, enough] = np.nanmean(values[:, enough], axis=0)
        return band


def metrics_of(runs: Iterable[RunRecord]) -> set[str]:
    """Names of all metrics with a curve in at least one run, evaluations included."""
    names: set[str] = set()
    for run in runs:
        names |= {name for name, (rollouts, _) in run.metrics.items() if len(rollouts)}
        names |= {name for record in run.evaluations for name in record if name.startswith("eval/")}
    return names


def seeds_of(runs: Sequence[RunRecord], metric: str, points: int = POINTS) -> Seeds | None:
    """The curves of some runs on one grid; None if no run has the metric.

    Sampled metrics are means over bins of rollouts; neighbouring bins are joined until at most ``points`` are left.
    Evaluations stay as they are.
    """
    curves = {run.seed: run_curve for run in runs if len((run_curve := curve(run, metric))[0])}
    if not curves:
        return None
    rollouts = np.unique(np.concatenate([ends for ends, _ in curves.values()]))
    sampled = not metric.startswith("eval/")
    if sampled:
        # the bin in which a run stopped is incomplete, and not on the grid of longer runs
        rollouts = rollouts[(rollouts % WIDTH == 0) | (rollouts == rollouts[-1])]
    values = np.full((len(curves), len(rollouts)), np.nan)
    for row, (ends, numbers) in zip(values, curves.values(), strict=True):
        shared = np.isin(ends, rollouts)
        row[np.searchsorted(rollouts, ends[shared])] = numbers[shared]
    join = -(-len(rollouts) // points)
    if join > 1 and sampled:
        starts = np.arange(0, len(rollouts), join)
        finite = np.isfinite(values)
        counts = np.add.reduceat(finite, starts, axis=1)
        sums = np.add.reduceat(np.where(finite, values, 0.0), starts, axis=1)
        values = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
        rollouts = rollouts[np.minimum(starts + join, len(rollouts)) - 1]
    return Seeds(rollouts, values, tuple(curves))


# -- which curve -----------------------------------------------------------------------------------------------------


def lead_sweep(comparison: Comparison) -> int | None:
    """Index of the sweep that the page opens with; None if it opens with a curve."""
    benches = {table.bench for table in comparison.tables}
    return 0 if len(comparison.sweeps) == 1 and comparison.outcomes and len(benches) == 1 else None


def lead_curve(comparison: Comparison) -> str | None:
    """The metric of the main outcome, whose curve opens the page; None if it opens with a sweep."""
    if lead_sweep(comparison) is not None:
        return None
    if comparison.outcomes:
        return curve_of(comparison, comparison.outcomes[0].name)
    return "reward/mean" if "reward/mean" in metrics_of(comparison.loaded.runs) else None


def curve_of(comparison: Comparison, outcome: str) -> str:
    """The metric whose curve best shows how an outcome came about."""
    if outcome in DERIVED:
        return "reward/mean"
    runs = comparison.loaded.runs
    names = metrics_of(runs)
    if outcome.startswith("eval/"):
        evaluations = max((sum(outcome in record for record in run.evaluations) for run in runs), default=0)
        trained = "tokens/entropy" if outcome == "eval/entropy" else "reward/mean"
        return trained if evaluations < FEWEST_EVALUATIONS and trained in names else outcome
    return outcome if outcome in names else outcome.removesuffix(AREA)


# -- numbers for the page ----------------------------------------------------------------------------------------------


def curve_data(groups: Mapping[str, Mapping[str, Sequence[RunRecord]]]) -> dict[str, Any]:
    """Curves of all runs.

    The keys are ``grids``, lists of rollouts, and ``curves``, by setting, method and metric.

    Args:
        groups: runs by setting and method; the keys are those of the page's controls.
    """
    numbers = sum(
        (len(runs) + len(BAND)) * len(metrics_of(runs)) for methods in groups.values() for runs in methods.values()
    )
    points = max(FEWEST, min(POINTS, BUDGET // max(numbers, 1)))
    grids: dict[tuple[int, ...], int] = {}
    curves: dict[str, Any] = {setting: {method: {} for method in methods} for setting, methods in groups.items()}
    for setting, method in ((setting, method) for setting, methods in groups.items() for method in methods):
        runs = groups[setting][method]
        for metric in sorted(metrics_of(runs)):
            if (seeds := seeds_of(runs, metric, points)) is None:
                continue
            losses = np.array([collapsed(run) for run in runs if run.seed in seeds.seeds])
            band = seeds.band(losses if losses.all() else ~losses, metric in METRICS["gradients"])
            curves[setting][method][metric] = {
                "grid": grids.setdefault(tuple(seeds.rollouts.tolist()), len(grids)),
                "names": list(seeds.seeds),
                "lost": losses.tolist(),
                "seeds": [significant(values, DIGITS) for values in seeds.values],
                **{name: significant(values, DIGITS) for name, values in zip(BAND, band, strict=True)},
            }
    return {"grids": list(map(list, grids)), "curves": curves}
