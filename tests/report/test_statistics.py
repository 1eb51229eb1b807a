"""Numbers with intervals: known answers, and how often an interval of 95 % holds the truth, by simulation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlstab.report import statistics
from rlstab.report.statistics import Estimate, against_baseline, holm, interquartile_mean, summary

SIX = {seed: value for seed, value in enumerate([0.1, 0.2, 0.3, 0.4, 0.5, 9.0])}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 3.0, 100.0], 2.5),  # one of four cut off at each end
        ([1.0, 2.0, 6.0], 3.0),  # a quarter of three is no whole value
        ([0.0, 1.0, 2.0, 3.0, 50.0], 2.0),
        ([-9.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 99.0], 1.5),
    ],
)
def test_the_interquartile_mean_cuts_whole_quarters(values: list[float], expected: float) -> None:
    assert interquartile_mean(np.array(values)) == pytest.approx(expected)


def test_a_summary_has_a_bootstrap_interval_that_holds_its_value_and_repeats() -> None:
    one = summary(SIX)
    assert one.value == pytest.approx(0.35)
    assert one.low < one.value < one.high
    assert one.how == "BCa bootstrap"
    assert summary(SIX) == one


def test_few_seeds_and_equal_values_have_no_interval_and_say_so() -> None:
    assert summary({}).how == "not measured"
    two = summary({0: 0.1, 1: 0.3})
    assert (two.value, two.low, two.high) == (pytest.approx(0.2), None, None)
    assert two.how == "no interval: 2 seeds, and 3 are needed"
    equal = summary({0: 0.5, 1: 0.5, 2: 0.5})
    assert (equal.value, equal.low) == (0.5, None)
    assert equal.how == "no interval: all 3 values are equal"


def test_where_bca_is_not_defined_percentiles_are_taken() -> None:
    # 61 of 64 equal: every jackknifed and nearly every resampled interquartile mean is the same
    one = summary({seed: float(seed < 3) for seed in range(64)})
    assert one.value == 0.0
    assert one.how == "percentile bootstrap"


def test_differences_are_by_seed_and_not_by_place() -> None:
    baseline = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 9: 0.0}
    found = against_baseline({"m": {3: 4.5, 2: 3.5, 1: 2.4, 0: 1.6, 7: 5.0}}, baseline)["m"]
    assert found.seeds == (0, 1, 2, 3)
    assert found.unpaired == (7, 9)
    assert found.difference.value == pytest.approx(0.5)
    # 0.6, 0.4, 0.5, 0.5: standard deviation 0.0816497, t of 3 degrees of freedom 3.18245
    assert found.difference.high - found.difference.value == pytest.approx(3.18245 * 0.0816497 / 2, rel=1e-5)
    assert found.p == pytest.approx(0.0011718, rel=1e-3)
    assert found.verdict == "higher"


def test_the_probability_of_improvement_counts_ties_half() -> None:
    baseline = dict.fromkeys(range(4), 1.0)
    wins = against_baseline({"m": {0: 2.0, 1: 2.0, 2: 1.0, 3: 0.0}}, baseline)["m"].wins
    assert wins.value == pytest.approx(5 / 8)
    assert wins.low < 5 / 8 < wins.high


def test_winning_every_seed_is_no_certainty() -> None:
    baseline = dict.fromkeys(range(5), 1.0)
    found = against_baseline({"m": {seed: 2.0 + seed for seed in range(5)}}, baseline)["m"]
    assert found.wins.value == 1.0
    # the lower end of the exact interval of 5 of 5: 0.025 ** (1 / 5)
    assert found.wins.low == pytest.approx(0.025**0.2)
    assert found.wins.how == "exact binomial"


def test_equal_runs_are_called_identical() -> None:
    found = against_baseline({"m": {0: 1.0, 1: 2.0, 2: 3.0}}, {0: 1.0, 1: 2.0, 2: 3.0})["m"]
    assert found.verdict == "identical"
    assert found.wins.value == 0.5


def test_noise_is_no_visible_difference() -> None:
    found = against_baseline({"m": {0: 1.2, 1: 1.8, 2: 3.1}}, {0: 1.0, 1: 2.0, 2: 3.0})["m"]
    assert found.verdict == "no visible difference"
    assert found.difference.low < 0 < found.difference.high


@pytest.mark.parametrize("values", [{}, {0: 5.0}, {0: 5.0, 1: 6.0}, {7: 1.0, 8: 2.0, 9: 3.0}])
def test_too_few_seeds_in_both_give_no_verdict(values: dict[int, float]) -> None:
    assert against_baseline({"m": values}, {0: 1.0, 1: 2.0, 2: 3.0})["m"].verdict == "too few seeds"


def test_a_constant_difference_is_no_certainty_either() -> None:
    found = against_baseline({"m": {0: 1.5, 1: 2.5, 2: 3.5}}, {0: 1.0, 1: 2.0, 2: 3.0})["m"]
    assert found.verdict == "too few seeds"
    assert found.difference.how == "no interval: all 3 differences are equal"


def test_holm_by_hand() -> None:
    # 4 x 0.005, 3 x 0.01, 2 x 0.03, and 1 x 0.04 may not be below the one before
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}


def test_many_comparisons_take_more_than_one_interval_that_excludes_zero() -> None:
    baseline = dict.fromkeys(range(5), 0.0)
    close = {0: 0.1, 1: 0.2, 2: 0.25, 3: 0.12, 4: 0.04}
    alone = against_baseline({"close": close}, baseline)["close"]
    assert alone.verdict == "higher"
    noise = {f"noise_{k}": {seed: float((seed + k) % 2) - 0.45 for seed in range(5)} for k in range(5)}
    among = against_baseline({"close": close, **noise}, baseline)["close"]
    assert among.difference == alone.difference
    assert among.verdict == "no visible difference"
    assert "higher before the correction" in among.remark


# -- coverage ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("seeds", "least", "most"), [(3, 0.66, 0.79), (5, 0.83, 0.94), pytest.param(12, 0.89, 0.97, marks=pytest.mark.slow)]
)
def test_the_interval_of_a_value_covers_less_with_few_seeds(
    seeds: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 499)
    # 300 repeats: two standard errors are 0.05 at 72 %, 0.03 at 93 %
    assert least < covered(summary, seeds, 300) < most


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
