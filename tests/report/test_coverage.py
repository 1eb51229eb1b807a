"""Intervals that say 95 %: how often they hold the truth, by simulation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from rlstab.report import statistics
from rlstab.report.statistics import Estimate, against_baseline, summary


def covered(estimate: Callable[[dict[int, float]], Estimate], seeds: int, repeats: int) -> float:
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(repeats):
        one = estimate(dict(enumerate(rng.normal(size=seeds))))
        hits += one.low <= 0.0 <= one.high
    return hits / repeats


def difference(values: dict[int, float]) -> Estimate:
    return against_baseline({"m": values}, dict.fromkeys(values, 0.0))["m"].difference


@pytest.mark.parametrize("seeds", [3, 5, 12])
def test_the_interval_of_a_difference_covers_what_it_says(seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_won", lambda differences: None)  # slow, and not looked at here
    # 1,000 repeats: two standard errors are 0.014
    assert covered(difference, seeds, 1000) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(("seeds", "least", "most"), [(3, 0.66, 0.79), (5, 0.83, 0.94), (12, 0.89, 0.97)])
def test_the_interval_of_a_value_covers_less_with_few_seeds(
    seeds: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 499)
    # 300 repeats: two standard errors are 0.05 at 72 %, 0.03 at 93 %
    assert least < covered(summary, seeds, 300) < most


def test_a_bootstrap_of_a_mean_would_not() -> None:
    def bootstrap(values: dict[int, float]) -> Estimate:
        found = np.array(list(values.values()))
        interval = stats.bootstrap((found,), np.mean, n_resamples=499, rng=np.random.default_rng(0)).confidence_interval
        return Estimate(0.0, float(interval.low), float(interval.high), "")

    assert covered(bootstrap, 5, 300) < 0.91


def test_verdicts_among_many_methods_err_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_won", lambda differences: None)
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(400):
        baseline = dict(enumerate(rng.normal(size=5)))
        methods = {str(k): dict(enumerate(rng.normal(size=5))) for k in range(5)}
        wrong += any(one.verdict in ("higher", "lower") for one in against_baseline(methods, baseline).values())
    # at most 5 % of the comparisons of six equal methods call any of them different; three standard errors above
    assert wrong / 400 < 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5
