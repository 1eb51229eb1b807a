"""The score of a row in a probe: what dose it tolerates relative to the base, what it costs at none, where it harms.

With ``y`` the held-out mean at the end, ``y0`` that of the policy at the start and ``d`` a dose, what is left of the
healthy gain is ``g(d) = (y(d) - y0) / (y_base(first dose) - y0)``. The tolerated dose is where a decreasing fit of the
mean of ``g`` over seeds (isotonic regression, linear between doses) crosses one half; the harm dose where it crosses 0.
"Half of the healthy value" instead would let a method survive that freezes the policy.

Intervals are at 95 %, percentiles of a bootstrap over seeds, which a row and the base share (B. Efron, R. Tibshirani,
"An Introduction to the Bootstrap", 1993). With three seeds they are too narrow, see :mod:`rlstab.report.statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from rlstab.report.statistics import CONFIDENCE, MIN_SEEDS

#: Of the bootstrap.
RESAMPLES, SEED = 1000, 0

#: Seeds of a quick map, the first ones of each probe: with no more, nothing finer than a verdict is told.
QUICK_SEEDS = 3

#: What is left of the healthy gain at the tolerated dose.
SURVIVAL = 0.5

#: Outcomes by dose and seed.
Outcomes = Mapping[float, Mapping[int, float]]


@dataclass(frozen=True)
class Interval:
    """A number with its interval; infinite where it lies beyond the last dose."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]")


@dataclass(frozen=True)
class Score:
    """One row in one probe.

    Attributes:
        tolerated: the dose at which half of the healthy gain is left; infinite beyond the last one.
        relative: that dose divided by the base's, or by the last one where the base's lies beyond it.
        limit: the last dose divided by the base's tolerated one: what an infinite ``relative`` is above.
        price: what is left of the healthy gain at the first dose, where nothing is wrong: 1 is no price.
        harm: the dose from which on training ends below its start; infinite beyond the last one.
        doses, seeds: with which it was made.
    """

    tolerated: float
    relative: Interval
    limit: float
    price: Interval
    harm: float
    doses: tuple[float, ...]
    seeds: tuple[int, ...]

    @property
    def visible(self) -> bool:
        """Whether its interval excludes 1, the base's dose."""
        low, high = self.relative.low, self.relative.high
        return low is not None and high is not None and not low <= 1 <= high

    @property
    def quick(self) -> bool:
        """Whether it has too few seeds for more than its verdict."""
        return len(self.seeds) <= QUICK_SEEDS

    @property
    def verdict(self) -> str:
        """In words: of a few seeds no difference below a factor of two."""
        if len(self.seeds) < MIN_SEEDS:
            return "too few seeds"
        if self.visible and self.relative.value >= 2:
            return "twice or more"
        if self.visible and self.relative.value <= 0.5:
            return "half or less"
        if self.visible and not self.quick:
            return "more" if self.relative.value > 1 else "less"
        return "no visible difference"


def score(row: Outcomes, base: Outcomes, start: float) -> Score | str:
    """The score of a row, or why it has none.

    Args:
        row: its outcomes; only doses and seeds that both have count, and those of all these doses.
        base: the base's.
        start: outcome of the policy before training.
    """
    doses = tuple(sorted(row.keys() & base.keys()))
    if len(doses) < 2 or doses[0] != min(base):
        return "fewer than two doses, or not the first"
    common = (seeds for outcomes in (row, base) for dose in doses for seeds in [set(outcomes[dose])])
    seeds = tuple(sorted(set.intersection(*common)))
    if not seeds:
        return "no seed has finished at every dose"
    x = np.array(doses)
    both = np.array([[[outcomes[dose][seed] for dose in doses] for seed in seeds] for outcomes in (row, base)])
    if not both[1, :, 0].mean() > start:
        return "the base gains nothing at the first dose"
    own, others, price = _measured(both, x, start)
    means = _left(both, start)[0]
    resampled = [_measured(both[:, chosen], x, start) for chosen in _resamples(len(seeds))]
    return Score(
        tolerated=own,
        relative=_interval(_ratio(own, others, x), [_ratio(a, b, x) for a, b, _ in resampled]),
        limit=float(x[-1]) / min(others, float(x[-1])) if others else math.nan,
        price=_interval(price, [cost for _, _, cost in resampled]),
        harm=crossing(x, means, 0.0),
        doses=doses,
        seeds=seeds,
    )


def _resamples(count: int) -> NDArray[np.int64]:
    drawn = np.random.default_rng(SEED).integers(count, size=(RESAMPLES, count))
    return drawn if count >= MIN_SEEDS else drawn[:0]


def _left(both: NDArray[np.float64], start: float) -> NDArray[np.float64]:
    """``(2, doses)``: what is left of the healthy gain, of the row and of the base."""
    means = both.mean(1)
    left: NDArray[np.float64] = (means - start) / max(means[1, 0] - start, 1e-9)
    return left


def _measured(both: NDArray[np.float64], doses: NDArray[np.float64], start: float) -> tuple[float, float, float]:
    """Tolerated doses of the row and the base, and the row's price."""
    row, base = _left(both, start)
    return crossing(doses, row, SURVIVAL), crossing(doses, base, SURVIVAL), float(row[0])


def crossing(doses: NDArray[np.float64], values: NDArray[np.float64], level: float) -> float:
    """Where a decreasing fit of values falls through a level: 0 where it never stood above, infinite where it stays."""
    fit = isotonic_regression(values, increasing=False).x
    if fit[0] < level:
        return 0.0
    if fit[-1] >= level:
        return math.inf
    place = int(np.argmax(fit < level))
    above, below = fit[place - 1], fit[place]
    return float(doses[place - 1] + (doses[place] - doses[place - 1]) * (above - level) / (above - below))


def _ratio(own: float, base: float, doses: NDArray[np.float64]) -> float:
    """Of two doses; two that lie beyond the last one are alike."""
    if math.isinf(own) and math.isinf(base):
        return 1.0
    return own / min(base, float(doses[-1])) if base else math.nan


def _interval(value: float, resampled: Sequence[float]) -> Interval:
    if not len(resampled):
        return Interval(value)
    ordered, tail = sorted(resampled), (1 - CONFIDENCE) / 2
    last = len(ordered) - 1
    return Interval(value, ordered[math.floor(tail * last)], ordered[math.ceil((1 - tail) * last)])
