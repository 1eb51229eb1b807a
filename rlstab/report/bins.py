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
        ends: last rollout of each bin that the run reached.
        values: means over the rollouts of the bin that have the metric, of 6 significant digits.
    """
    rollouts, values = record.metrics.get(name, EMPTY)
    if record.bin_width > 1:
        finite = np.isfinite(values)
        return rollouts[finite], values[finite]
    return in_bins((rollouts, values), record.rollouts, _mean)


def weights(record: RunRecord, ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """Rollouts in each bin that ends at one of ``ends``: the last may have fewer than the others."""
    width = record.bin_width if record.bin_width > 1 else WIDTH
    return ((ends - 1) % width + 1).astype(np.float64)


def highest(curve: Curve, last: int) -> Curve:
    """The largest value of each bin."""
    return in_bins(curve, last, lambda values: float(values.max()))


def in_bins(curve: Curve, last: int, summary: Callable[[NDArray[np.float64]], float]) -> Curve:
    """One value per bin of ``WIDTH`` rollouts, ``last`` ending the run, over finite values; empty bins are left out."""
    rollouts, values = curve
    finite = np.isfinite(values)
    rollouts, values = rollouts[finite], values[finite]
    places = (rollouts - 1) // WIDTH
    order = np.argsort(places, kind="stable")  # so each bin is a slice, in the order of the curve
    kept, starts = np.unique(places[order], return_index=True)
    ends = np.minimum((kept + 1) * WIDTH, last)
    summaries = [rounded(summary(inside)) for inside in np.split(values[order], starts[1:])] if len(kept) else []
    return ends.astype(np.int64), np.array(summaries, dtype=np.float64)


def _mean(values: NDArray[np.float64]) -> float:
    return math.fsum(values.tolist()) / len(values)


def running_total(curve: Curve, last: int) -> Curve | None:
    """The sum of a metric up to the end of each bin; None unless each rollout from 1 to ``last`` has a value."""
    rollouts, values = curve
    if not last or len(rollouts) != last or not np.isfinite(values).all():
        return None
    ends = np.unique(np.minimum(np.arange(WIDTH, last + WIDTH, WIDTH), last))
    return ends.astype(np.int64), np.array([rounded(one) for one in np.cumsum(values)[ends - 1]], dtype=np.float64)


EMPTY: Curve = (np.array([], dtype=np.int64), np.array([], dtype=np.float64))
