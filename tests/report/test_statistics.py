"""Numbers with intervals: known answers, and how often that of a value holds the truth, by simulation."""

import numpy as np
import pytest
from scipy import stats

from rlstab.report.statistics import (
    Paired,
    _student,
    _won,
    against_baseline,
    bound_of,
    holm,
    interquartile_mean,
    summary,
)


def paired(values: dict[int, float], baseline: dict[int, float]) -> Paired:
    return against_baseline({"m": values}, baseline)["m"]


def test_the_interquartile_mean_cuts_whole_quarters() -> None:
    for values, expected in (
        ([1.0, 2.0, 3.0, 100.0], 2.5),  # one of four cut off at each end
        ([1.0, 2.0, 6.0], 3.0),  # a quarter of three is not a whole value
        ([0.0, 1.0, 2.0, 3.0, 50.0], 2.0),
        ([-9.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 99.0], 1.5),
    ):
        assert interquartile_mean(np.array(values)) == pytest.approx(expected)


def test_a_summary_has_an_interval_around_its_value_that_repeats() -> None:
    six = dict(enumerate([0.1, 0.2, 0.3, 0.4, 0.5, 9.0]))
    estimate = summary(six)
    assert estimate.value == pytest.approx(0.35)
    assert estimate.high - estimate.value == pytest.approx(estimate.value - estimate.low)
    assert (estimate.how, summary(six)) == ("trimmed t", estimate)
    # winsorised 0.2, 0.2, 0.3, 0.4, 0.5, 0.5: standard deviation 0.137840; a sixth is cut at each end
    error = 0.137840 / (2 / 3 * 6**0.5)
    assert estimate.high - estimate.value == pytest.approx(bound_of(6) * error, rel=1e-5)
    assert bound_of(3) == pytest.approx(4.30265, rel=1e-5)  # Student's t of 2 degrees of freedom: nothing is cut
    most_equal = summary({seed: float(seed < 3) for seed in range(64)})
    assert (most_equal.value, most_equal.low) == (0.0, None)
    assert summary({0: 1.7e308, 1: -1.7e308, 2: 1e308}).low is None


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
    constant = paired({0: 1.5, 1: 2.5, 2: 3.5}, baseline)
    assert (constant.verdict, constant.power) == ("higher", None)
    assert constant.difference.how == "no interval: all 3 differences are equal"
    assert paired({0: 1.0}, baseline).verdict == "too few seeds"  # one equal seed says as little as one other


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


def test_what_seeds_without_a_visible_difference_could_have_shown() -> None:
    """Against the noncentral t of scipy, and by repetitions."""
    rng = np.random.default_rng(5)
    noise = rng.normal(size=8)
    pair = paired(dict(enumerate(noise - noise.mean() + 0.1 * noise.std(ddof=1))), dict.fromkeys(range(8), 0.0))
    assert (pair.verdict, pair.power is None) == ("no visible difference", False)
    shift = pair.power.difference / noise.std(ddof=1)
    bound = stats.t.ppf(0.975, 7)
    assert stats.nct.sf(bound, 7, shift * 8**0.5) + stats.nct.cdf(-bound, 7, shift * 8**0.5) == pytest.approx(
        0.8, abs=1e-3
    )
    draws = rng.normal(shift, 1, (4000, 8))
    seen = np.abs(draws.mean(1)) / draws.std(1, ddof=1) * 8**0.5 > bound
    assert seen.mean() == pytest.approx(0.8, abs=0.02)
    # a tenth of a deviation: (1.96 + 0.84)^2 / 0.01 is 785 by the normal distribution, and two more by the t
    assert pair.power.seeds == pytest.approx(787, abs=1)
    assert paired({0: 1.0, 1: -1.0, 2: 0.0001}, dict.fromkeys(range(3), 0.0)).power.seeds is None
    three = against_baseline({name: dict(enumerate(noise)) for name in "abc"}, dict.fromkeys(range(8), 0.0))
    assert three["a"].power.difference > pair.power.difference  # three verdicts share the level


@pytest.mark.parametrize("seeds", [3, 20, *(pytest.param(seeds, marks=pytest.mark.slow) for seeds in (5, 8))])
def test_every_interval_of_a_page_holds_what_it_says(seeds: int) -> None:
    """Of 2,000 draws two standard errors are one point. The share of wins is a whole number of seeds: more is held."""
    rng, held = np.random.default_rng(seeds), {"value": 0, "difference": 0, "wins": 0}
    for _ in range(2000):
        own, base = rng.normal(0.3, 1, seeds), rng.normal(0, 1, seeds)
        truths = {
            "value": (summary(dict(enumerate(own))), 0.3),
            "difference": (_student(own - base)[0], 0.3),
            "wins": (_won(own - base), stats.norm.cdf(0.3 / 2**0.5)),
        }
        for name, (estimate, truth) in truths.items():
            held[name] += estimate.low <= truth <= estimate.high
    seen = {name: count / 2000 for name, count in held.items()}
    print(f"{seeds} seeds: {seen}")
    assert seen["value"] == pytest.approx(0.95, abs=0.02)
    assert seen["difference"] == pytest.approx(0.95, abs=0.02)
    assert seen["wins"] >= 0.93
