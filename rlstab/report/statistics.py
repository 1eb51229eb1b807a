"""Numbers with intervals: means, paired differences, and shares.

Every interval is at 95 %. ``python -m benchmarks intervals`` draws seeds of known truth, counts how often each interval
holds it, and writes the table of docs/how-to/compare.md:

- For a mean, and for the mean paired difference, on which verdicts rest: Student's t at 96.5 %. It holds 96.5 % of
  normal differences, and 93 % of lognormal ones, of which Student's t at 95 % holds 91 %. Corrections for skewness
  (N. Johnson, P. Hall) and bootstraps hold no more of few seeds, or show much less.
- For a share, such as that of the runs that a method loses: the exact binomial interval (C. Clopper, E. Pearson, 1934),
  which covers more than 95 % for most shares.

No interval of a few seeds covers the mean of a method that loses a quarter of its runs: Student's holds it in 76 % of
five seeds. So runs that are lost are counted (:mod:`rlstab.report.collapse`), and a mean is that of the survivors.

Each interval holds separately. Verdicts hold for all methods of one setting and one outcome together: Holm's step-down
adjustment (S. Holm, "A Simple Sequentially Rejective Multiple Test Procedure", 1979) of the p-values. They do not hold
over several outcomes or settings together.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import special  # scipy.stats computes by it, and takes a second to import

#: Two-sided level of every interval; verdicts use one minus it.
CONFIDENCE = 0.95
#: Student's t leaves out this share of normal values, so that the interval of skewed ones covers 93 % of them.
STUDENT_LEVEL = 0.035
#: With fewer seeds there is a value but no interval.
MIN_SEEDS = 3
#: The share of repetitions in which the stated seeds show a difference ...
POWER = 0.8
#: ... which fewer seeds than this do not determine: their own deviation is wrong by a factor of two and more.
MIN_POWER_SEEDS = 8

Verdict: TypeAlias = Literal["higher", "lower", "no visible difference", "identical", "too few seeds", "baseline"]
Values: TypeAlias = Mapping[int, float]


@dataclass(frozen=True)
class Estimate:
    """A number with its interval.

    Attributes:
        value: the number; None if nothing was measured.
        low: lower end of the interval; None without one.
        high: its upper end, likewise.
        how: ``Student's t``, ``exact binomial``, or why there is no interval.
    """

    value: float | None
    low: float | None
    high: float | None
    how: str


@dataclass(frozen=True)
class Share(Estimate):
    """``hits`` of ``count``."""

    hits: int
    count: int

    def __str__(self) -> str:
        return f"{self.hits} of {self.count}"

    @property
    def percent(self) -> str:
        """Its interval."""
        return (
            "unknown" if self.low is None or self.high is None else f"{100 * self.low:.0f} to {100 * self.high:.0f} %"
        )


NOT_MEASURED = Estimate(None, None, None, "not measured")


@dataclass(frozen=True)
class Paired:
    """A method against the baseline, seed by seed.

    Attributes:
        difference: mean of method minus baseline, with its interval.
        seeds: the seeds that method and baseline share.
        verdict: a word, such as ``higher``, which says nothing about better.
        remark: what the verdict alone hides; may be empty.
        power: the ends of the range in which the difference lies that these seeds would show in a share :data:`POWER`
            of repetitions, if none is visible; else None.
        differences: one of each seed.
    """

    difference: Estimate
    seeds: tuple[int, ...]
    verdict: Verdict
    remark: str
    power: tuple[float, float] | None = None
    differences: tuple[float, ...] = ()


def summary(values: Values) -> Estimate:
    """Mean over seeds with its interval."""
    return mean_of(np.array(list(values.values()), dtype=np.float64), "values")[0] if values else NOT_MEASURED


def mean_of(
    values: NDArray[np.float64], what: str = "differences", *, constant: bool = False
) -> tuple[Estimate, float | None]:
    """The mean with its interval, and the two-sided p-value of a mean of zero; None without a test.

    Equal differences have no deviation. If both methods are ``constant``, p is that of exchanging values between them;
    else it is that of the signs.
    """
    count = len(values)
    if count == 0:
        return Estimate(None, None, None, "no seed in both"), None
    with np.errstate(over="ignore", invalid="ignore"):
        mean, error = float(values.mean()), float(values.std(ddof=1) if count > 1 else 0) / math.sqrt(count)
    if count < MIN_SEEDS:
        seeds = f"{count} seed{'s' * (count != 1)}"
        return Estimate(mean, None, None, f"no interval: {seeds}, and {MIN_SEEDS} are needed"), None
    if not math.isfinite(error):
        return Estimate(mean, None, None, f"no interval for the {count} {what}: they are too large for one"), None
    if error <= 1e-12 * max(1.0, abs(mean)):
        return Estimate(mean, None, None, f"no interval: all {count} {what} are equal"), 2 / math.comb(
            2 * count, count
        ) if constant else 2.0 ** (1 - count)
    half = student_bound(count, STUDENT_LEVEL) * error
    # scaled, so that it is below 5 % where the interval leaves out zero
    p = float(2 * special.stdtr(count - 1, -abs(mean) / error)) * (1 - CONFIDENCE) / STUDENT_LEVEL
    return Estimate(mean, mean - half, mean + half, "Student's t"), min(1.0, p)


def student_bound(count: int, level: float = 1 - CONFIDENCE) -> float:
    """Largest distance of a mean of normal values from the truth, in standard errors, except in a share ``level``."""
    return float(special.stdtrit(count - 1, 1 - level / 2))


def against_baseline(methods: Mapping[str, Values], baseline: Values) -> dict[str, Paired]:
    """Each method against the baseline, by seed, with verdicts that hold for all of them together."""
    seeds = {name: tuple(sorted(values.keys() & baseline.keys())) for name, values in methods.items()}
    differences = {
        name: np.array([methods[name][seed] - baseline[seed] for seed in common]) for name, common in seeds.items()
    }
    means = {
        name: mean_of(values, constant=len({baseline[seed] for seed in seeds[name]}) == 1)
        for name, values in differences.items()
    }
    adjusted = holm({name: p for name, (_, p) in means.items() if p is not None and differences[name].any()})
    paired = {}
    for name, (mean, _) in means.items():
        verdict, remark = _judged(mean, differences[name], adjusted.get(name))
        unseen = verdict == "no visible difference" and len(seeds[name]) >= MIN_POWER_SEEDS
        power = power_of(differences[name], len(adjusted)) if unseen else None
        by_seed = tuple(differences[name].tolist())
        paired[name] = Paired(mean, seeds[name], verdict, remark, power, by_seed)
    return paired


def power_of(differences: NDArray[np.float64], comparisons: int = 1) -> tuple[float, float]:
    """The range in which the smallest difference lies that is shown in a share :data:`POWER` of repetitions.

    It is that of normal differences, for every deviation that a chi-square interval at 95 % holds. The sum of two
    quantiles of Student's t is within 1 % of what the noncentral t gives for eight seeds.

    Args:
        differences: one for each seed, not all equal.
        comparisons: number judged together; the level is that of the strictest step of Holm's adjustment.
    """
    count, tail = len(differences), (1 - CONFIDENCE) / 2
    quantiles = student_bound(count, STUDENT_LEVEL / comparisons) + float(special.stdtrit(count - 1, POWER))
    effect = quantiles * float(differences.std(ddof=1)) * math.sqrt((count - 1) / count)
    low, high = (effect / math.sqrt(float(special.chdtri(count - 1, share))) for share in (tail, 1 - tail))
    return low, high


def student_t(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over seeds, ``(seeds, n)`` to ``(n,)``, in units of the bound beyond which zero is excluded at 95 %."""
    count = len(values)
    bound = student_bound(count) * values.std(0, ddof=1) / math.sqrt(count)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.nan_to_num(values.mean(0) / bound, nan=0.0))


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values: the i-th smallest of m times (m - i + 1), never below the one before it, at most 1."""
    names = sorted(p_values, key=p_values.__getitem__)
    multiplied = (min(1.0, (len(names) - rank) * p_values[name]) for rank, name in enumerate(names))
    return dict(zip(names, accumulate(multiplied, max), strict=True))


def _judged(difference: Estimate, differences: NDArray[np.float64], p: float | None) -> tuple[Verdict, str]:
    if len(differences) > 1 and not differences.any():
        return "identical", f"the same value in each of {len(differences)} seeds"
    if p is None or difference.value is None:
        return "too few seeds", difference.how
    side: Verdict = "higher" if difference.value > 0 else "lower"
    if difference.low is None or difference.high is None:
        reason = f"by the same in each of {len(differences)} seeds: no interval, and an exact test gives {p_value(p)}"
        return side if p < 1 - CONFIDENCE else "too few seeds", f"{side} {reason}"
    if p < 1 - CONFIDENCE:
        return side, ""
    if difference.low > 0 or difference.high < 0:
        return "no visible difference", f"{side} before the correction for several comparisons"
    return "no visible difference", ""


def share(hits: int, count: int) -> Share:
    """A share with its exact interval."""
    if count == 0:
        return Share(None, None, None, NOT_MEASURED.how, 0, 0)
    tail = (1 - CONFIDENCE) / 2
    low = float(special.betaincinv(hits, count - hits + 1, tail)) if hits else 0.0
    high = float(special.betainccinv(hits + 1, count - hits, tail)) if hits < count else 1.0
    return Share(hits / count, low, high, "exact binomial", hits, count)


def unseen_rate(count: int) -> float:
    """The largest rate of an event that none of ``count`` runs shows in one case of twenty."""
    return float(1 - (1 - CONFIDENCE) ** (1 / count))


def exact_p(first: int, second: int) -> float:
    """The p-value of pairs that differ, ``first`` of them one way and ``second`` the other (the exact McNemar test)."""
    return min(1.0, float(2 * special.bdtr(min(first, second), first + second, 0.5))) if first + second else 1.0


def p_value(p: float) -> str:
    """``p = .25``, with two digits."""
    return "p < .001" if p < 0.001 else f"p = {float(f'{p:.2g}'):g}".replace("0.", ".", 1)
