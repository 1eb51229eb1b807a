"""BNPO: divided by a Beta density, against scipy's and against figures worked out elsewhere."""

from __future__ import annotations

import statistics

import pytest
import torch
from scipy import stats

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.errors import OutOfRange
from rlstab.stages.bnpo import BNPO
from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.response_batch import ResponseBatch
from tests.stages.estimating import advantages, batch, by_group, drawn


def with_rates(*right: int, of: int = 10) -> ResponseBatch:
    """A group of ``of`` responses for each number of right ones."""
    rewards = [float(one < count) for count in right for one in range(of)]
    return batch(rewards, [place for place in range(len(right)) for _ in range(of)])


@pytest.mark.parametrize("seed", range(2))
def test_every_advantage_by_hand(seed: int) -> None:
    whole = drawn(seed, graded=True)
    groups = by_group(whole)
    rates = {place: statistics.fmean(whole.rewards[one].tolist()) for one in groups for place in one}
    each = [rates[one[0]] for one in groups]
    mean, variance = statistics.fmean(each), statistics.variance(each)
    spare = mean * (1 - mean) / variance - 1
    alpha, beta = max(1 + spare * mean / 3, 1), max(1 + spare * (1 - mean) / 3, 1)
    (found,) = advantages(BNPO(), whole)
    for place, reward in enumerate(whole.rewards.tolist()):
        density = float(stats.beta.pdf(rates[place], alpha, beta))
        weight = min(1 / density, 1e6) if density else 1e6
        assert float(found[place]) == pytest.approx((reward - rates[place]) * weight, abs=1e-10)


def test_figures_of_four_pass_rates() -> None:
    given = with_rates(2, 4, 6, 8)
    stage = BNPO()
    stat, state = measure_all(stage, [given], {}, LocalComm())
    assert {name: one.value for name, one in stage.report(given, stat, state).items()} == pytest.approx(
        {"alpha": 1.458333, "beta": 1.458333}, abs=1e-6
    )
    found = stage.advantages(given, stat, state)
    weights = [float(found[10 * place]) / (1 - rate) for place, rate in enumerate((0.2, 0.4, 0.6, 0.8))]
    assert weights == pytest.approx([0.9795, 0.8134, 0.8134, 0.9795], abs=1e-4)
    assert [1 / one for one in weights] == pytest.approx([1.0209, 1.2294, 1.2294, 1.0209], abs=1e-4)


@pytest.mark.parametrize(
    ("right", "what"),
    [
        ((3, 3, 3), "all pass rates are equal"),
        ((3,), "there is one group"),
        ((0, 10, 1, 10), "they vary as much as pass rates can, so that alpha and beta would be below 1"),
    ],
)
def test_it_is_dr_grpo_where(right: tuple[int, ...], what: str) -> None:
    given = with_rates(*right)
    found, expected = (advantages(one, given)[0].tolist() for one in (BNPO(), DrGRPO()))
    assert found == pytest.approx(expected), what


def test_pass_rates_that_differ_by_a_rounding_are_equal() -> None:
    # the sums 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in their last digit
    given = batch([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], [0, 0, 0, 1, 1, 1])
    assert len(set(given.group_mean(given.rewards).tolist())) == 2
    assert advantages(BNPO(), given)[0].tolist() == pytest.approx(advantages(DrGRPO(), given)[0].tolist())


def test_rewards_are_mapped() -> None:
    given = with_rates(2, 4, 6, 8)
    mapped = given.reshaped(given.rewards * 3 - 1)
    expected = advantages(BNPO(), given)[0]
    torch.testing.assert_close(advantages(BNPO(low=-1.0, high=2.0), mapped)[0], expected, rtol=1e-12, atol=0)


def test_rewards_outside_are_refused() -> None:
    with pytest.raises(OutOfRange) as caught:
        advantages(BNPO(), batch([1.0, -0.5, 0.0]))
    assert str(caught.value) == (
        "'bnpo': a reward is -0.5, expected [0.0, 1.0]. Set low and high to the least and the greatest reward that "
        "there can be, penalties included."
    )
