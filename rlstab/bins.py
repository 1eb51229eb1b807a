"""Curves of a run, and their means over bins of ten rollouts.

Bins of ten rollouts are smooth enough to read, and the same from a run folder and from a results file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Rollouts of one bin. Statistics and signs read bins, so a results file gives the same as the folders of its runs.
WIDTH = 10

#: No run is longer: a rollout beyond it is damage, and would not fit into an array either.
MOST_ROLLOUTS = 10**9

#: Rollouts (int64) and values (float64), of equal length.
Curve: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float64]]

EMPTY: Curve = (np.array([], dtype=np.int64), np.array([], dtype=np.float64))


@dataclass(frozen=True)
class Sign:
    """The judgement of one detector about one run.

    Attributes:
        name: a key of :data:`rlstab.signs.SIGNS`.
        fired: whether the sign is present; None if the curves do not say.
        step: at which it begins; None if it is absent.
        text: the values in words, or why it could not be judged.
        share: the remaining share of something that falls: of the reward, of the answers that end.
        harm: whether the run itself was hurt: reward, held-out score or finished answers were lost, values are NaN, or
            nothing can be learnt. Any other sign is an observation.
        from_start: whether it is present in the first line of the log.
    """

    name: str
    fired: bool | None
    step: int | None
    text: str
    share: float | None = None
    harm: bool = False
    from_start: bool = False


class Run(Protocol):
    """The curves of a run, finished or not; see :class:`rlstab.report.runs.RunRecord`."""

    @property
    def metrics(self) -> Mapping[str, Curve]: ...
    @property
    def largest(self) -> Mapping[str, Curve]: ...
    @property
    def evaluations(self) -> Sequence[Mapping[str, float]]: ...
    @property
    def bin_width(self) -> int: ...
    @property
    def rollouts(self) -> int: ...
    @property
    def judged(self) -> Mapping[str, Sign]: ...


@lru_cache(2**16)  # a run that is watched has the same bins at each line
def rounded(value: float) -> float:
    """To the 6 significant digits of a results file."""
    return float(f"{value:.6g}")


def binned(record: Run, name: str) -> Curve:
    """Means of a metric over bins of rollouts; a bin without a finite value is left out.

    Returns:
        ends: last rollout of each bin that the run reached.
        values: means over the rollouts of the bin that have the metric, of 6 significant digits.
    """
    known: dict[str, Curve] = vars(record).setdefault("_bins", {})  # asked for again and again
    if name not in known:
        rollouts, values = record.metrics.get(name, EMPTY)
        finite = np.isfinite(values)
        joined = record.bin_width > 1
        known[name] = (rollouts[finite], values[finite]) if joined else in_bins((rollouts, values), record.rollouts)
    return known[name]


def bin_weights(bin_width: int, ends: NDArray[np.int64]) -> NDArray[np.float64]:
    """Number of rollouts in each bin that ends at one of ``ends``; the last may have fewer than the others."""
    width = bin_width if bin_width > 1 else WIDTH
    return ((ends - 1) % width + 1).astype(np.float64)


def last_tenth(record: Run, name: str) -> float | None:
    """Mean of a metric over the last tenth of the rollouts, rounded up to whole bins of ten."""
    return mean_at_end(binned(record, name), record.rollouts, record.bin_width)


def mean_at_end(bins: Curve, rollouts: int, bin_width: int) -> float | None:
    """The same of the bins of a curve; None if the last tenth has none."""
    ends, values = bins
    inside = ends > rollouts - max(1, rollouts // 10)
    if not inside.any():
        return None
    return float(np.average(values[inside], weights=bin_weights(bin_width, ends[inside])))


def in_bins(curve: Curve, last: int, *, largest: bool = False) -> Curve:
    """The mean, or the largest value, of each bin of ``WIDTH`` rollouts, ``last`` ending the run.

    Only finite values count; empty bins are left out.
    """
    rollouts, values = curve
    finite = np.isfinite(values)
    rollouts, values = rollouts[finite], values[finite]
    if not len(values):
        return EMPTY
    bins = (rollouts - 1) // WIDTH
    if (bins[1:] < bins[:-1]).any():
        order = np.argsort(bins, kind="stable")  # so each bin is a slice, in the order of the curve
        bins, values = bins[order], values[order]
    starts = np.concatenate(([0], np.flatnonzero(bins[1:] != bins[:-1]) + 1))
    ends = np.minimum((bins[starts] + 1) * WIDTH, last)
    counts = np.concatenate((starts[1:], [len(bins)])) - starts
    summaries = np.maximum.reduceat(values, starts) if largest else np.add.reduceat(values, starts) / counts
    return ends.astype(np.int64), np.array(list(map(rounded, summaries.tolist())), dtype=np.float64)


def noise(values: NDArray[np.float64]) -> float:
    """Standard deviation of one value, without what a steady rise or fall adds; 0 for fewer than three.

    Second differences of independent values vary by the square root of 1 + 4 + 1 more than each; 1.4826 makes a
    deviation of the median of normal ones.
    """
    return 1.4826 * float(np.median(np.abs(np.diff(values, n=2)))) / math.sqrt(6) if len(values) > 2 else 0.0


def slope(x: NDArray[np.float64], values: NDArray[np.float64], deviation: float) -> tuple[float, float]:
    """The rise of a straight line through values, and its standard error.

    Args:
        x: where the values are; at least two differ.
        values: of the same length.
        deviation: standard deviation of one value.
    """
    centred = x - x.mean()
    spread = float(centred @ centred)
    return float(centred @ values) / spread, deviation / math.sqrt(spread)
