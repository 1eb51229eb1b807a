"""Curves in bins of ten rollouts: smooth enough to read, and the same from a folder and from a results file."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlstab.report.model import WIDTH, Curve, RunRecord, rounded


def binned(record: RunRecord, name: str) -> Curve:
    """Means of a metric over bins of rollouts; a bin without a finite value is left out.

    Returns:
        steps: last rollout of each bin that the run reached.
        values: means over the rollouts of the bin that have the metric, of 6 significant digits.
    """
    steps, values = record.metrics.get(name, EMPTY)
    if record.bin_width > 1:
        finite = np.isfinite(values)
        return steps[finite], values[finite]
    return in_bins((steps, values), record.rollouts, _mean)


def weights(record: RunRecord, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """Rollouts in each bin that ends at one of ``steps``: the last may have fewer than the others."""
    width = record.bin_width if record.bin_width > 1 else WIDTH
    return ((steps - 1) % width + 1).astype(np.float64)


def highest(curve: Curve, rollouts: int) -> Curve:
    """The largest value of each bin."""
    return in_bins(curve, rollouts, lambda values: float(values.max()))


def in_bins(curve: Curve, rollouts: int, summary: Callable[[NDArray[np.float64]], float]) -> Curve:
    """One value a bin of ``WIDTH`` rollouts, over its finite values; bins without any are left out."""
    steps, values = curve
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    places = (steps - 1) // WIDTH
    kept = np.unique(places)
    ends = np.minimum((kept + 1) * WIDTH, rollouts)
    summaries = [rounded(summary(values[places == place])) for place in kept]
    return ends.astype(np.int64), np.array(summaries, dtype=np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    return math.fsum(values.tolist()) / len(values)


EMPTY: Curve = (np.array([], dtype=np.int64), np.array([], dtype=np.float64))
