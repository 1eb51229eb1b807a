"""Curves of many runs on common grids: what the figures of the page and the saved ones are drawn from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstab.report.bins import binned
from rlstab.report.model import WIDTH, Curve, RunRecord

#: Numbers that all curves together may hold: about 7 bytes each in the page.
BUDGET = 320_000
#: More points than this say no more at the width of a figure.
POINTS = 120


@dataclass(frozen=True)
class Seeds:
    """One metric of one method in one setting.

    Attributes:
        rollouts: ``(n,)``.
        values: ``(seeds, n)``; NaN where a run has none.
        seeds: of the rows.
    """

    rollouts: NDArray[np.int64]
    values: NDArray[np.float64]
    seeds: tuple[int, ...]

    def mean(self) -> NDArray[np.float64]:
        """``(n,)`` mean over the seeds; NaN where fewer than half of them have a value."""
        return self._over(np.mean)

    def median(self) -> NDArray[np.float64]:
        """``(n,)`` median over the seeds, likewise."""
        return self._over(np.median)

    def quantile(self, share: float) -> NDArray[np.float64]:
        """``(n,)`` quantile over the seeds, likewise."""
        return self._over(lambda values: np.quantile(values, share))

    def _over(self, summary: Callable[[NDArray[np.float64]], Any]) -> NDArray[np.float64]:
        found = np.full(len(self.rollouts), np.nan)
        for place, column in enumerate(self.values.T):
            there = column[np.isfinite(column)]
            if len(there) and 2 * len(there) >= len(self.seeds):
                found[place] = summary(there)
        return found


def metrics_of(runs: Iterable[RunRecord]) -> set[str]:
    """Names of everything that has a curve in at least one run, evaluations included."""
    found: set[str] = set()
    for run in runs:
        found |= {name for name, (rollouts, _) in run.metrics.items() if len(rollouts)}
        found |= {name for record in run.evaluations for name in record if name.startswith("eval/")}
    return found


def seeds_of(runs: Sequence[RunRecord], metric: str, points: int = POINTS) -> Seeds | None:
    """The curves of some runs on one grid; None if no run has the metric.

    Sampled metrics are means over bins of rollouts; neighbouring bins are joined until at most ``points`` are left.
    Evaluations stay as they are.
    """
    curves = {run.seed: curve for run in runs if len((curve := _curve(run, metric))[0])}
    if not curves:
        return None
    rollouts = np.unique(np.concatenate([curve[0] for curve in curves.values()]))
    if not metric.startswith("eval/"):
        # the bin in which one run stopped is not whole, and on no grid of those that went on
        rollouts = rollouts[(rollouts % WIDTH == 0) | (rollouts == rollouts[-1])]
    values = np.full((len(curves), len(rollouts)), np.nan)
    for row, (own, found) in zip(values, curves.values(), strict=True):
        there = np.isin(own, rollouts)
        row[np.searchsorted(rollouts, own[there])] = found[there]
    join = -(-len(rollouts) // points)
    if join > 1 and not metric.startswith("eval/"):
        rollouts, values = _joined(rollouts, values, join)
    return Seeds(rollouts, values, tuple(curves))


def _curve(run: RunRecord, metric: str) -> Curve:
    if not metric.startswith("eval/"):
        return binned(run, metric)
    found = {one["rollout"]: one[metric] for one in run.evaluations if metric in one and "rollout" in one}
    return np.array(list(found), dtype=np.int64), np.array(list(found.values()), dtype=np.float64)


def _joined(
    rollouts: NDArray[np.int64], values: NDArray[np.float64], join: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ends = np.minimum(np.arange(join - 1, len(rollouts) + join - 1, join), len(rollouts) - 1)
    starts = np.concatenate([[0], ends[:-1] + 1])
    means = np.full((len(values), len(ends)), np.nan)
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        part = values[:, start : end + 1]
        there = np.isfinite(part)
        some = there.any(axis=1)
        means[some, place] = np.where(there, part, 0.0).sum(axis=1)[some] / there.sum(axis=1)[some]
    return rollouts[ends], means
