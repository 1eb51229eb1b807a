"""BNPO: divided by a Beta density, against scipy's and against figures worked out elsewhere."""

import statistics

import pytest
from scipy import stats

from rlstab.errors import OutOfRange
from rlstab.stages.bnpo import BNPO
from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.response_batch import ResponseBatch
from tests.stages.responses import advantages, batch, by_group, drawn


def with_rates(*right: int, of: int = 10) -> ResponseBatch:
    """A group of ``of`` responses for each number of right ones."""
    rewards = [float(place < count) for count in right for place in range(of)]
    return batch(rewards, [group for group in range(len(right)) for _ in range(of)])


@pytest.mark.parametrize("seed", range(2))
def test_every_advantage_by_hand(seed: int) -> None:
    whole = drawn(seed, graded=True)
    groups = by_group(whole)
    rates = {place: statistics.fmean(whole.rewards[places].tolist()) for places in groups for place in places}
    each = [rates[places[0]] for places in groups]
    mean, variance = statistics.fmean(each), statistics.variance(each)
    spare = mean * (1 - mean) / variance - 1
    alpha, beta = max(1 + spare * mean / 3, 1), max(1 + spare * (1 - mean) / 3, 1)
    (given,) = advantages(BNPO(), whole)
    for place, reward in enumerate(whole.rewards.tolist()):
        density = float(stats.beta.pdf(rates[place], alpha, beta))
        weight = min(1 / density, 1e6) if density else 1e6
        assert float(given[place]) == pytest.approx((reward - rates[place]) * weight, abs=1e-10)


@pytest.mark.parametrize(
    "given",
    [
        with_rates(3, 3, 3),
        with_rates(3),
        with_rates(0, 10, 1, 10),
        # the sums 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in their last digit
        batch([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], [0, 0, 0, 1, 1, 1]),
    ],
    ids=["equal pass rates", "one group", "alpha and beta below 1", "rates equal but for a rounding"],
)
def test_it_is_dr_grpo_where(given: ResponseBatch) -> None:
    ours, expected = (advantages(estimator, given)[0].tolist() for estimator in (BNPO(), DrGRPO()))
    assert ours == pytest.approx(expected)


def test_rewards_are_mapped() -> None:
    given = with_rates(2, 4, 6, 8)
    mapped = given.reshaped(given.rewards * 3 - 1)
    expected = advantages(BNPO(), given)[0]
    given = advantages(BNPO(low=-1.0, high=2.0), mapped)[0]
    assert given.tolist() == pytest.approx(expected.tolist(), rel=1e-12)


def test_rewards_outside_are_refused() -> None:
    with pytest.raises(OutOfRange, match="'bnpo': a reward is"):
        advantages(BNPO(), batch([1.0, -0.5, 0.0]))
