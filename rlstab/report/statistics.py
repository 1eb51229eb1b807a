"""Numbers with intervals: interquartile means, paired differences, how often one method ends higher than the baseline.

Every interval is at 95 %, also for few seeds; ``tests/report/test_statistics.py`` draws 3, 5, 8 and 20 values
many times and counts:

- For the mean paired difference, on which verdicts rest: Student's t.
- For the interquartile mean of one method's values: the same for a trimmed mean, whose error is that of the winsorised
  values (J. Tukey, D. McLaughlin, "Less Vulnerable Confidence and Significance Procedures for Location Based on a
  Single Sample", 1963). Its bound is drawn from normal values, once for each number of seeds; Student's is small.
- For the share of seeds won: the exact binomial interval, which covers more than 95 % for most shares.

Bootstraps over seeds do not reach 95 %: with normal values BCa covers 72 % with 3 seeds and 92 % with 8.

The interquartile mean and the probability of improvement are the summaries that R. Agarwal et al., "Deep Reinforcement
Learning at the Edge of the Statistical Precipice", 2021, arXiv 2108.13264, recommend for few runs.

Each interval holds separately. Verdicts hold for all methods of one setting and one outcome together: Holm's step-down
adjustment (S. Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979) of the paired t-test's p-values.
They do not hold over several outcomes or settings together.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special  # scipy.stats computes by it, and takes a second to import

#: Two-sided level of every interval; verdicts use one minus it.
CONFIDENCE = 0.95
#: With fewer seeds there is a value but no interval.
MIN_SEEDS = 3
#: The share of repetitions in which the stated seeds show a difference.
POWER = 0.8
#: A needed number of seeds is stated up to this one.
MOST_SEEDS = 1000
#: Quantiles of a sample's deviation, over which the noncentral t is summed.
QUANTILES = 4000
#: Bisection steps to the smallest difference shown; a few more than its last digit needs.
NEWTON = 6
#: Normal samples that give the bound of a trimmed mean, to within 2 %.
DRAWS = 50_000
#: Seed of these samples: the same runs give the same interval.
SEED = 0

Verdict: TypeAlias = Literal["higher", "lower", "no visible difference", "identical", "too few seeds", "baseline"]
Values: TypeAlias = Mapping[int, float]


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Attributes:
        value: the number; None if nothing was measured.
        low: lower end of the interval; None without one.
        high: its upper end, likewise.
        how: ``Student's t``, ``trimmed t``, ``exact binomial``, or why there is no interval.
    """

    value: float | None
    low: float | None
    high: float | None
    how: str


NOT_MEASURED = Estimate(None, None, None, "not measured")


@dataclass(frozen=True)
class Paired:
    """A method against the baseline, seed by seed.

    Attributes:
        difference: mean of method minus baseline, with its interval.
        wins: probability of a higher value than the baseline: share of seeds won, ties half.
        seeds: those in both.
        verdict: in words. ``higher`` says nothing about better.
        remark: what the verdict alone hides; may be empty.
        power: what these seeds could have shown, if no difference is visible; else None.
    """

    difference: Estimate
    wins: Estimate
    seeds: tuple[int, ...]
    verdict: Verdict
    remark: str
    power: Power | None = None


@dataclass(frozen=True)
class Power:
    """What a comparison can show, in a share :data:`POWER` of its repetitions.

    Attributes:
        difference: the smallest one that these seeds show that often.
        seeds: the number that a difference of the observed size needs; None above :data:`MOST_SEEDS`.
    """

    difference: float
    seeds: int | None


def interquartile_mean(values: Any, axis: int = -1) -> Any:
    """Mean without the lowest and highest quarter, each rounded down to whole values: three values are all kept."""
    ordered = np.sort(np.moveaxis(np.asarray(values), axis, -1))
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)


def summary(values: Values) -> Estimate:
    """Interquartile mean over seeds with its interval."""
    if not values:
        return NOT_MEASURED
    ordered, count = np.sort(np.array(list(values.values()), dtype=np.float64)), len(values)
    value = float(interquartile_mean(ordered))
    if count < MIN_SEEDS:
        return Estimate(value, None, None, _few(count))
    if ordered[0] == ordered[-1]:
        return Estimate(value, None, None, f"no interval: all {count} values are equal")
    error = float(_error(ordered))
    if not 0 < error < math.inf:
        why = "the middle half of them is equal" if error == 0 else "they are too large for one"
        return Estimate(value, None, None, f"no interval for the {count} values: {why}")
    half = bound_of(count) * error
    return Estimate(value, value - half, value + half, "trimmed t" if count // 4 else "Student's t")


def _error(ordered: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard error of interquartile means, of values sorted along the last axis: ``(..., n)`` to ``(...)``."""
    count = ordered.shape[-1]
    cut = count // 4
    middle = ordered[..., cut : count - cut]
    winsorised = np.clip(ordered, middle[..., :1], middle[..., -1:])
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(winsorised.std(axis=-1, ddof=1) / ((1 - 2 * cut / count) * math.sqrt(count)))


def student_bound(count: int, level: float = 1 - CONFIDENCE) -> float:
    """Largest distance of a mean of normal values from the truth, in standard errors, except in a share ``level``."""
    return float(special.stdtrit(count - 1, 1 - level / 2))


@cache
def bound_of(count: int) -> float:
    """The same for an interquartile mean of normal values, in 95 % of samples."""
    if count // 4 == 0:
        return student_bound(count)
    drawn = np.sort(np.random.default_rng(SEED).standard_normal((DRAWS, count)))
    return float(np.sort(np.abs(interquartile_mean(drawn)) / _error(drawn))[math.ceil(CONFIDENCE * DRAWS) - 1])


def against_baseline(methods: Mapping[str, Values], baseline: Values) -> dict[str, Paired]:
    """Each method against the baseline, by seed, with verdicts that hold for all of them together."""
    seeds = {name: tuple(sorted(values.keys() & baseline.keys())) for name, values in methods.items()}
    differences = {
        name: np.array([methods[name][seed] - baseline[seed] for seed in own]) for name, own in seeds.items()
    }
    means = {name: _student(values) for name, values in differences.items()}
    together = holm({name: p for name, (_, p) in means.items() if p is not None})
    paired = {}
    for name, (mean, _) in means.items():
        verdict, remark = _judged(mean, differences[name], together.get(name))
        power = power_of(differences[name], len(together)) if verdict == "no visible difference" else None
        paired[name] = Paired(mean, _won(differences[name]), seeds[name], verdict, remark, power)
    return paired


def power_of(differences: NDArray[np.float64], comparisons: int = 1) -> Power:
    """What Student's t shows of normal differences with this deviation, by the noncentral t.

    Args:
        differences: of the seeds, not all equal.
        comparisons: number judged together; the level is that of the strictest step of Holm's adjustment.
    """
    count, deviation = len(differences), float(differences.std(ddof=1))
    level = (1 - CONFIDENCE) / comparisons

    def shown(effect: float, seeds: int) -> float:
        """The probability of a verdict for an effect given in deviations."""
        bounds, shift = student_bound(seeds, level) * _deviations(seeds - 1), effect * math.sqrt(seeds)
        return float((special.ndtr(shift - bounds) + special.ndtr(-shift - bounds)).mean())

    root, bounds = math.sqrt(count), student_bound(count, level) * _deviations(count - 1)
    smallest = (float(bounds.mean()) + float(special.ndtri(POWER))) / root
    for _ in range(NEWTON):
        slopes = np.exp(-((smallest * root - bounds) ** 2) / 2) - np.exp(-((smallest * root + bounds) ** 2) / 2)
        smallest -= (shown(smallest, count) - POWER) / (root * float(slopes.mean()) / math.sqrt(2 * math.pi))
    effect = abs(float(differences.mean())) / deviation
    enough = range(MIN_SEEDS, MOST_SEEDS + 1)
    first = bisect_left(enough, POWER, key=lambda seeds: shown(effect, seeds))
    return Power(smallest * deviation, enough[first] if first < len(enough) else None)


@cache
def _deviations(freedom: int) -> NDArray[np.float64]:
    """Evenly spaced quantiles of a sample's deviation over the true one, since scipy's noncentral t may be NaN."""
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return np.asarray(np.sqrt(2 * special.gammaincinv(freedom / 2, shares) / freedom))


def student_t(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over seeds, ``(seeds, n)`` to ``(n,)``, in units of the bound beyond which zero is excluded at 95 %."""
    count = len(values)
    bound = student_bound(count) * values.std(0, ddof=1) / math.sqrt(count)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(values.mean(0) / bound, nan=0.0))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values: the i-th smallest of m times (m - i + 1), never below the one before it, at most 1."""
    names = sorted(p_values, key=p_values.__getitem__)
    alone = (min(1.0, (len(names) - place) * p_values[name]) for place, name in enumerate(names))
    return dict(zip(names, accumulate(alone, max), strict=True))


def _student(differences: NDArray[np.float64]) -> tuple[Estimate, float | None]:
    """Mean difference with its interval, and the two-sided p-value of no difference."""
    count = len(differences)
    if count == 0:
        return Estimate(None, None, None, "no seed in both"), None
    mean = float(differences.mean())
    if count < MIN_SEEDS:
        return Estimate(mean, None, None, _few(count)), None
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    if error <= 1e-12 * max(1.0, abs(mean)):
        return Estimate(mean, None, None, f"no interval: all {count} differences are equal"), 0.0
    half = student_bound(count) * error
    p = float(2 * special.stdtr(count - 1, -abs(mean) / error))
    return Estimate(mean, mean - half, mean + half, "Student's t"), p


def _judged(difference: Estimate, differences: NDArray[np.float64], p: float | None) -> tuple[Verdict, str]:
    if len(differences) > 1 and not differences.any():
        return "identical", f"the same value in each of {len(differences)} seeds"
    if p is None or difference.value is None:
        return "too few seeds", difference.how
    side: Verdict = "higher" if difference.value > 0 else "lower"
    if difference.low is None or difference.high is None:  # no deviation, and so no doubt that the test could state
        return side, f"by the same in each of {len(differences)} seeds, which gives no interval"
    if p < 1 - CONFIDENCE:
        return side, ""
    if difference.low > 0 or difference.high < 0:
        return "no visible difference", f"{side} before the correction for several comparisons"
    return "no visible difference", ""


def _won(differences: NDArray[np.float64]) -> Estimate:
    """Share of seeds in which the method is above the baseline, ties half."""
    wins = (np.sign(differences) + 1) / 2
    count = len(wins)
    if count == 0:
        return Estimate(None, None, None, "no seed in both")
    if count < MIN_SEEDS:
        return Estimate(float(wins.mean()), None, None, _few(count))
    won, tail = float(wins.sum()), (1 - CONFIDENCE) / 2
    low = float(special.betaincinv(won, count - won + 1, tail)) if won else 0.0
    high = float(special.betainccinv(won + 1, count - won, tail)) if won < count else 1.0
    return Estimate(won / count, low, high, "exact binomial")


def _few(count: int) -> str:
    return f"no interval: {count} seed{'s' * (count != 1)}, and {MIN_SEEDS} are needed"
