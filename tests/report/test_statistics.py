"""Numbers with intervals: known answers, and how often that of a value holds the truth, by simulation."""

import numpy as np
import pytest

from rlstab.report import statistics
from rlstab.report.statistics import Paired, against_baseline, holm, interquartile_mean, summary


def paired(values: dict[int, float], baseline: dict[int, float]) -> Paired:
    return against_baseline({"m": values}, baseline)["m"]


def test_the_interquartile_mean_cuts_whole_quarters() -> None:
    for values, expected in (
        ([1.0, 2.0, 3.0, 100.0], 2.5),  # one of four cut off at each end
        ([1.0, 2.0, 6.0], 3.0),  # a quarter of three is no whole value
        ([0.0, 1.0, 2.0, 3.0, 50.0], 2.0),
        ([-9.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 99.0], 1.5),
    ):
        assert interquartile_mean(np.array(values)) == pytest.approx(expected)


def test_a_summary_has_a_bootstrap_interval_that_holds_its_value_and_repeats() -> None:
    six = dict(enumerate([0.1, 0.2, 0.3, 0.4, 0.5, 9.0]))
    estimate = summary(six)
    assert estimate.value == pytest.approx(0.35)
    assert estimate.low < estimate.value < estimate.high
    assert (estimate.how, summary(six)) == ("BCa bootstrap", estimate)
    # 61 of 64 equal: every jackknifed and nearly every resampled interquartile mean is the same
    estimate = summary({seed: float(seed < 3) for seed in range(64)})
    assert (estimate.value, estimate.how) == (0.0, "percentile bootstrap")


def test_few_seeds_and_equal_values_have_no_interval_and_say_so() -> None:
    for values, value, how in (
        ([], None, "not measured"),
        ([0.1, 0.3], 0.2, "no interval: 2 seeds, and 3 are needed"),
        ([0.5, 0.5, 0.5], 0.5, "no interval: all 3 values are equal"),
    ):
        estimate = summary(dict(enumerate(values)))
        assert (estimate.value, estimate.low, estimate.high, estimate.how) == (pytest.approx(value), None, None, how)


def test_differences_are_by_seed_and_not_by_place() -> None:
    pair = paired({3: 4.5, 2: 3.5, 1: 2.4, 0: 1.6, 7: 5.0}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0, 9: 0.0})
    assert (pair.seeds, pair.verdict) == ((0, 1, 2, 3), "higher")
    assert pair.difference.value == pytest.approx(0.5)
    # 0.6, 0.4, 0.5, 0.5: standard deviation 0.0816497, t of 3 degrees of freedom 3.18245
    assert pair.difference.high - pair.difference.value == pytest.approx(3.18245 * 0.0816497 / 2, rel=1e-5)


def test_wins_count_ties_half_and_winning_every_seed_is_no_certainty() -> None:
    wins = paired({0: 2.0, 1: 2.0, 2: 1.0, 3: 0.0}, dict.fromkeys(range(4), 1.0)).wins
    assert wins.value == pytest.approx(5 / 8)
    assert wins.low < 5 / 8 < wins.high
    wins = paired({seed: 2.0 + seed for seed in range(5)}, dict.fromkeys(range(5), 1.0)).wins
    # the lower end of the exact interval of 5 of 5: 0.025 ** (1 / 5)
    assert (wins.value, wins.low, wins.how) == (1.0, pytest.approx(0.025**0.2), "exact binomial")


def test_verdicts() -> None:
    baseline = {0: 1.0, 1: 2.0, 2: 3.0}
    same, noise = paired(baseline, baseline), paired({0: 1.2, 1: 1.8, 2: 3.1}, baseline)
    assert (same.verdict, same.wins.value) == ("identical", 0.5)
    assert noise.verdict == "no visible difference"
    assert noise.difference.low < 0 < noise.difference.high
    for values in ({}, {0: 5.0}, {0: 5.0, 1: 6.0}, {7: 1.0, 8: 2.0, 9: 3.0}):
        assert paired(values, baseline).verdict == "too few seeds"
    constant = paired({0: 1.5, 1: 2.5, 2: 3.5}, baseline)  # no certainty either
    assert constant.verdict == "too few seeds"
    assert constant.difference.how == "no interval: all 3 differences are equal"


def test_many_comparisons_take_more_than_one_interval_that_excludes_zero() -> None:
    # 4 x 0.005, 3 x 0.01, 2 x 0.03, and 1 x 0.04 may not be below the one before
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    baseline, close = dict.fromkeys(range(5), 0.0), {0: 0.1, 1: 0.2, 2: 0.25, 3: 0.12, 4: 0.04}
    alone = paired(close, baseline)
    assert alone.verdict == "higher"
    noise = {f"noise_{k}": {seed: float((seed + k) % 2) - 0.45 for seed in range(5)} for k in range(5)}
    among = against_baseline({"close": close, **noise}, baseline)["close"]
    assert (among.difference, among.verdict) == (alone.difference, "no visible difference")
    assert "higher before the correction" in among.remark


@pytest.mark.parametrize(
    ("seeds", "least", "most"), [(3, 0.66, 0.79), (5, 0.83, 0.94), pytest.param(12, 0.89, 0.97, marks=pytest.mark.slow)]
)
def test_the_interval_of_a_value_covers_less_with_few_seeds(
    seeds: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the pages say. Of 300 draws two standard errors are 0.05 at 72 %, 0.03 at 93 %."""
    monkeypatch.setattr(statistics, "RESAMPLES", 499)
    rng = np.random.default_rng(7)
    draws = [summary(dict(enumerate(rng.normal(size=seeds)))) for _ in range(300)]
    assert least < sum(drawn.low <= 0.0 <= drawn.high for drawn in draws) / 300 < most
