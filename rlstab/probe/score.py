"""The score of a row in a probe: the dose that it tolerates relative to the base, its price, and where it harms.

With ``y`` the held-out mean at the end, ``y0`` that of the policy at the start and ``d`` a dose, the remaining share of
the healthy gain is ``g(d) = (y(d) - y0) / (y_base(first dose) - y0)``. The tolerated dose is where a decreasing fit of
the mean of ``g`` over seeds (isotonic regression, linear between doses) crosses one half; the harm dose where it
crosses 0. With half of the healthy value instead, a method that freezes the policy would survive.

Intervals are at 95 %: the values that Student's t does not exclude on differences paired by seed (as E. C. Fieller,
"Some Problems in Interval Estimation", 1954, for the ratio of two means). A price ``p`` is excluded where the mean of
``y - y0 - p (y_base - y0)`` at the first dose is not 0. A relative dose ``r`` is excluded where the row at ``r`` times
the base's tolerated dose has another mean than half of the healthy gain; that the base's dose is itself an estimate
counts to first order. ``tests/probe/test_score.py`` counts how often they hold with 3, 5, 8 and 20 seeds.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, isotonic_regression

from rlstab.report.statistics import MIN_SEEDS, student_t

#: Number of relative doses that are tried, evenly over the doses.
TRIED = 500

#: Seeds of a quick map, the first ones of each probe; with so few, only a verdict is given.
QUICK_SEEDS = 3

#: The remaining share of the healthy gain at the tolerated dose.
SURVIVAL = 0.5

#: Outcomes by dose and seed.
Outcomes = Mapping[float, Mapping[int, float]]


@dataclass(frozen=True)
class Interval:
    """A number with its interval; infinite beyond the last dose."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.2f}" + ("" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]")


@dataclass(frozen=True)
class Score:
    """One row in one probe.

    Attributes:
        tolerated: the dose at which half of the healthy gain is left; infinite beyond the last dose.
        relative: that dose divided by the base's, or by the last dose if the base's lies beyond it.
        limit: the last dose divided by the base's tolerated dose: a lower bound of an infinite ``relative``.
        price: the remaining share of the healthy gain at the first dose, where nothing is wrong: 1 costs nothing.
        harm: the lowest dose at which training ends below its start; infinite beyond the last dose.
        doses, seeds: those from which the score was made.
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
        """Whether it has too few seeds for more than a verdict."""
        return len(self.seeds) <= QUICK_SEEDS

    @property
    def verdict(self) -> str:
        """The verdict in words; with few seeds, only differences of a factor of two or more."""
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
        row: its outcomes; only doses that both have count, and seeds that both have at all these doses.
        base: outcomes of the base.
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
    rewards = np.array([[[outcomes[dose][seed] for dose in doses] for seed in seeds] for outcomes in (row, base)])
    if not rewards[1, :, 0].mean() > start:
        return "the base gains nothing at the first dose"
    gains = rewards - start
    healthy = gains[1, :, 0]
    means = gains.mean(1) / healthy.mean()
    tolerated, base_limit = (crossing(x, left, SURVIVAL) for left in means)
    return Score(
        tolerated=tolerated,
        relative=_relative(gains, x, tolerated, base_limit),
        limit=float(x[-1]) / min(base_limit, float(x[-1])) if base_limit else math.nan,
        price=_price(gains[0, :, 0], healthy),
        harm=crossing(x, means[0], 0.0),
        doses=doses,
        seeds=seeds,
    )


def _price(gains: NDArray[np.float64], healthy: NDArray[np.float64]) -> Interval:
    """The remaining share of the healthy gain, and the shares that the seeds do not exclude."""
    value = float(gains.mean() / healthy.mean())
    if len(gains) < MIN_SEEDS:
        return Interval(value)
    if abs(student_t(healthy[:, None])[0]) <= 1:  # the healthy gain may be 0, and a share of it anything
        return Interval(value, -math.inf, math.inf)

    def excluded(share: float) -> float:
        return float(abs(student_t((gains - share * healthy)[:, None])[0])) - 1

    low, high = (_end(excluded, value, side) for side in (-1, 1))
    return Interval(value, low, high)


def _end(excluded: Callable[[float], float], value: float, side: int) -> float:
    """The end of an interval on one side of its value."""
    width = 1e-6
    while excluded(value + side * width) <= 0:
        width *= 2
    return float(brentq(lambda step: excluded(value + side * step), 0.0, width)) * side + value


def _relative(gains: NDArray[np.float64], doses: NDArray[np.float64], row: float, base: float) -> Interval:
    """The ratio of two tolerated doses, and the ratios that the seeds do not exclude.

    Args:
        gains: ``(2, seeds, doses)``, of the row and the base.
        doses: ascending.
        row: its tolerated dose.
        base: the score of the base.
    """
    last = float(doses[-1])
    value = row / min(base, last) if base else math.nan
    if math.isinf(row) and math.isinf(base):  # two beyond the last dose count as equal
        value = 1.0
    if gains.shape[1] < MIN_SEEDS or not base:
        return Interval(value)
    if np.array_equal(*gains):  # the same runs
        return Interval(value, value, value)
    of_row, of_base = (_fitted(values) - SURVIVAL * gains[1, :, :1] for values in gains)
    dose = min(base, last)
    tried = np.linspace(float(doses[0]), last, TRIED)
    rewards = np.array([np.interp(tried, doses, seed) for seed in of_row])
    if base <= last:  # the base's dose varies with its seeds, and so does a ratio
        base_rewards = np.array([np.interp(dose, doses, seed) for seed in of_base])
        step = (last - float(doses[0])) / TRIED
        slope = np.gradient(rewards.mean(0), step)
        steepness = np.diff(np.interp([dose - step, dose + step], doses, of_base.mean(0)))[0] / (2 * step)
        if steepness < 0:
            rewards = rewards - base_rewards[:, None] * (slope * tried / dose / steepness)
    scores = student_t(rewards)
    first = np.logical_and.accumulate(scores > 1).sum()
    end = len(scores) - np.logical_and.accumulate(scores[::-1] < -1).sum()
    low, high = (_fall(scores, tried, int(right), side) / dose for right, side in ((first, 1), (end, -1)))
    return Interval(value, min(low, value), max(high, value))


def _fall(scores: NDArray[np.float64], tried: NDArray[np.float64], right: int, bound: float) -> float:
    """Where scores fall through a bound, left of a tried dose; the nearest tried one would narrow the interval."""
    if right in (0, len(tried)):
        return math.inf if right else 0.0
    ends = [right, right - 1]
    return float(np.interp(bound, scores[ends], tried[ends]))


def _fitted(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seeds, ``(seeds, doses)``, averaged over the doses that the decreasing fit of their mean joins."""
    blocks = isotonic_regression(values.mean(0), increasing=False).blocks
    joined = [np.repeat(block.mean(1, keepdims=True), block.shape[1], 1) for block in np.split(values, blocks[1:-1], 1)]
    return np.concatenate(joined, 1)


def crossing(doses: NDArray[np.float64], values: NDArray[np.float64], level: float) -> float:
    """Where a decreasing fit of values falls below a level: 0 if it never is above, infinite if it stays above."""
    fit = isotonic_regression(values, increasing=False).x
    if fit[0] < level:
        return 0.0
    if fit[-1] >= level:
        return math.inf
    index = int(np.argmax(fit < level))
    above, below = fit[index - 1], fit[index]
    return float(doses[index - 1] + (doses[index] - doses[index - 1]) * (above - level) / (above - below))
