"""Numbers with intervals: known answers, and how often they hold the truth, by simulation."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.intervals import DISTRIBUTIONS, RATES, SEEDS, held, held_power, held_rate
from rlstab.report.statistics import (
    STUDENT_LEVEL,
    Paired,
    against_baseline,
    exact_p,
    holm,
    p_value,
    power_of,
    share,
    summary,
    unseen_rate,
)


def paired(values: dict[int, float], baseline: dict[int, float]) -> Paired:
    return against_baseline({"m": values}, baseline)["m"]


def test_a_summary_has_an_interval_around_its_mean() -> None:
    estimate = summary(dict(enumerate([0.1, 0.2, 0.3, 0.4])))
    assert estimate.value == pytest.approx(0.25)
    # a deviation of 0.129099; Student's t of 3 degrees of freedom leaves 3.5 % beyond 3.67 errors
    assert stats.t.sf(3.6700, 3) == pytest.approx(STUDENT_LEVEL / 2, rel=1e-3)
    assert estimate.high - 0.25 == pytest.approx(0.25 - estimate.low) == pytest.approx(3.6700 * 0.129099 / 2, rel=1e-3)
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
    assert pair.differences == pytest.approx((0.6, 0.4, 0.5, 0.5))
    # 0.6, 0.4, 0.5, 0.5: standard deviation 0.0816497
    assert pair.difference.value == pytest.approx(0.5)
    assert pair.difference.high - 0.5 == pytest.approx(3.6700 * 0.0816497 / 2, rel=1e-3)


def test_rates_and_pairs_are_those_of_scipy() -> None:
    for hits, count in ((0, 8), (3, 8), (5, 5), (1, 20)):
        ends, rate = stats.binomtest(hits, count).proportion_ci(), share(hits, count)
        assert (rate.low, rate.high) == pytest.approx((ends.low, ends.high))
    for first, second in ((3, 0), (5, 2), (0, 7), (4, 4)):
        assert exact_p(first, second) == pytest.approx(stats.binomtest(first, first + second).pvalue)
    assert exact_p(0, 0) == 1
    # none of eight runs shows a rate of 31 % in one case of twenty: 0.69 ** 8 is 0.05
    assert [(1 - unseen_rate(count)) ** count for count in (3, 8)] == pytest.approx([0.05, 0.05])
    assert [f"{100 * unseen_rate(count):.0f}" for count in (3, 8)] == ["63", "31"]
    assert [p_value(p) for p in (0.25, 1.0, 0.0156, 1e-9)] == ["p = .25", "p = 1", "p = .016", "p < .001"]


def test_verdicts() -> None:
    baseline = {0: 1.0, 1: 2.0, 2: 3.0}
    same, noise = paired(baseline, baseline), paired({0: 1.2, 1: 1.8, 2: 3.1}, baseline)
    assert same.verdict == "identical"
    assert noise.verdict == "no visible difference"
    assert noise.difference.low < 0 < noise.difference.high
    for values in ({}, {0: 5.0}, {0: 5.0, 1: 6.0}, {7: 1.0, 8: 2.0, 9: 3.0}):
        assert paired(values, baseline).verdict == "too few seeds"
    assert paired({0: 1.0}, baseline).verdict == "too few seeds"  # one equal seed says as little as one other


def test_equal_differences_are_an_exact_test_that_others_correct() -> None:
    zero, rising = dict.fromkeys(range(10), 0.0), {seed: float(seed) for seed in range(10)}

    def constant(seeds: int) -> dict[int, float]:
        return dict.fromkeys(range(seeds), 0.5)

    def shifted(seeds: int) -> dict[int, float]:
        return {seed: seed + 0.5 for seed in range(seeds)}

    three = paired(constant(3), zero)
    assert three.verdict == "too few seeds"
    assert three.remark == "higher by the same in each of 3 seeds: no interval, and an exact test gives p = .1"
    assert three.difference.how == "no interval: all 3 differences are equal"
    # two of 252 ways to deal ten values give these; of signs, two of 32 are equal
    assert (paired(constant(5), zero).verdict, paired(shifted(5), rising).verdict) == ("higher", "too few seeds")
    assert paired(shifted(6), rising).verdict == "higher"
    others = {f"noise_{k}": {seed: float((seed + k) % 2) - 0.45 for seed in range(6)} for k in range(5)}
    assert against_baseline({"m": constant(4), **others}, zero)["m"].verdict == "too few seeds"
    assert against_baseline({"m": constant(10), **others}, zero)["m"].verdict == "higher"


def test_coarse_noise_among_five_methods_is_rarely_called_a_difference() -> None:
    """Sums of 4 coarse scores, three seeds: a verdict for some method in at most a twentieth of comparisons."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(1000):
        scores = rng.binomial(4, 0.5, (6, 3)) / 4
        baseline, *methods = (dict(enumerate(row)) for row in scores.tolist())
        verdicts = against_baseline({str(k): method for k, method in enumerate(methods)}, baseline)
        wrong += any(pair.verdict in ("higher", "lower") for pair in verdicts.values())
    assert wrong / 1000 < 0.05


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


def test_what_eight_seeds_could_have_shown_is_a_range_and_fewer_say_nothing() -> None:
    rng = np.random.default_rng(5)
    noise = rng.normal(size=8)
    pair = paired(dict(enumerate(noise - noise.mean() + 0.1 * noise.std(ddof=1))), dict.fromkeys(range(8), 0.0))
    assert pair.verdict == "no visible difference"
    low, high = pair.power
    # the ends of the deviation's interval at 95 %, and between them the difference that the noncentral t gives
    assert (high / low) ** 2 == pytest.approx(stats.chi2.ppf(0.975, 7) / stats.chi2.ppf(0.025, 7))
    effect = low / noise.std(ddof=1) * (stats.chi2.ppf(0.975, 7) / 7) ** 0.5
    bound = stats.t.ppf(1 - STUDENT_LEVEL / 2, 7)
    assert stats.nct.sf(bound, 7, effect * 8**0.5) == pytest.approx(0.8, abs=0.02)
    three = against_baseline({name: dict(enumerate(noise)) for name in "abc"}, dict.fromkeys(range(8), 0.0))
    assert three["a"].power[0] > power_of(noise)[0]  # three verdicts share the level
    seven = paired(dict(enumerate([1.0, -1.0, 0.5, -0.6, 0.1, 0.2, -0.1])), dict.fromkeys(range(7), 0.0))
    assert (seven.verdict, seven.power) == ("no visible difference", None)


def test_an_interval_holds_what_it_says() -> None:
    for name, seeds in (("normal", 5), ("lognormal differences", 8), ("lost: 25 %", 8)):
        assert 0.92 <= held(name, seeds, 2000)[0] <= 0.98, (name, seeds)
    assert held_rate(0.25, 8, 2000) >= 0.94
    assert held_power(8, 500) >= 0.92


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SEEDS)
def test_every_interval_of_a_page_holds_what_it_says(seeds: int) -> None:
    """Of 20,000 draws two standard errors are 0.3 points. Three seeds are printed in the docs, and promise nothing."""
    shares = {name: held(name, seeds, 20_000)[0] for name in DISTRIBUTIONS}
    print(f"{seeds} seeds: {shares}")
    # near 1, sixteen prompts give a few values of t, between which no level lies
    highest = {name: 0.975 if name.endswith("near 1") else 0.97 for name in shares}
    assert {name: each for name, each in shares.items() if not 0.93 <= each <= highest[name]} == {} or seeds == 3
    assert min(held_rate(rate, seeds, 20_000) for rate in RATES) >= 0.948
    assert seeds < 8 or 0.93 <= held_power(seeds, 4000) <= 0.97
