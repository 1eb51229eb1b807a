"""Selectors against plain loops, what decides between prompts that are equal, and what a pool refuses."""

import functools
import operator
import random

import pytest
import torch

from rlstab.stages import pass_rates
from rlstab.stages.goldilocks import Goldilocks
from rlstab.stages.goldilocks_teacher import GoldilocksTeacher
from rlstab.stages.in_order import STREAM, InOrder
from rlstab.stages.paced import Paced
from rlstab.stages.slots import best_first, shuffled
from rlstab.stages.uniform import Uniform
from tests.stages.responses import settled, values_of
from tests.stages.selections import evidence, expected_spread, fill, number, offer, responses, rollouts_of, state_after


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("drawn", "count", "size"), [(0, 4, 10), (8, 4, 10), (7, 25, 10), (3, 2, 1), (20, 5, 5)])
def test_in_order_goes_through_epochs(shuffle, drawn, count, size):
    """Position by position, with the whole epoch sorted for each."""
    expected = []
    for epoch, within in (divmod(place, size) for place in range(drawn, drawn + count)):
        order = list(range(size))
        if shuffle:
            order.sort(key=lambda prompt, epoch=epoch: number(3 + STREAM, epoch, prompt))
        expected.append(order[within])
    assert InOrder(shuffle=shuffle).select(offer(count, drawn=drawn, size=size, seed=3), {}).tolist() == expected


@pytest.mark.parametrize(("first", "count", "pool"), [(0, 4, 10), (4, 3, 10), (8, 9, 10), (0, 10, 10), (3, 40, 5)])
def test_uniform_equals_the_oracle(first, count, pool):
    expected = fill([0.0] * pool, first + count, 1.0, seed=4, rollout=2)[first:]
    for own, size in ((pool, None), (None, pool)):  # without a pool of its own, the whole task
        asked = offer(count, first=first, rollout=2, size=size, seed=4)
        assert Uniform(pool=own).select(asked, {}).tolist() == expected


@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
def test_the_pass_rates_equal_the_oracle(discount):
    rollouts = rollouts_of(7, 5, seed=1)
    state = state_after(Goldilocks(pool=7, discount=discount), rollouts)
    expected = torch.tensor(evidence(rollouts, 7, discount), dtype=torch.float64)
    torch.testing.assert_close(torch.stack([state["right"], state["wrong"]], 1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("right", "wrong"), [(0, 0), (4, 0), (0, 8), (4, 4), (0.3, 2.6), (57.5, 20.25), (400, 3)])
def test_the_expected_spread_is_the_integral(right, wrong):
    state = {"right": torch.tensor([right], dtype=torch.float64), "wrong": torch.tensor([wrong], dtype=torch.float64)}
    assert float(pass_rates.expected_spread(state)) == pytest.approx(expected_spread(right, wrong), rel=1e-7)
    assert float(pass_rates.expected_rate(state)) == pytest.approx((1 + right) / (2 + right + wrong), rel=1e-14)


@pytest.mark.parametrize("random_share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("target", [None, 0.5, 0.2, 0.9])
def test_what_is_selected_by_pass_rates_equals_the_oracle(target, random_share):
    rollouts, settings = rollouts_of(11, 4, seed=4), {"pool": 11, "discount": 0.9, "random_share": random_share}
    stage = Goldilocks(**settings) if target is None else Paced(**settings, target=target)
    values = []
    for right, wrong in evidence(rollouts, 11, 0.9):
        rate = (1 + right) / (2 + right + wrong)
        values.append(expected_spread(right, wrong, 2000) if target is None else -abs(rate - target))
    state, expected = state_after(stage, rollouts), fill(values, 23, random_share, seed=6, rollout=4)
    for first, count in ((0, 5), (5, 4), (9, 14)):
        chosen = stage.select(offer(count, first=first, rollout=4, seed=6), state).tolist()
        assert chosen == expected[first : first + count]


def test_what_pass_rates_report():
    stage = Goldilocks(pool=4)
    state = state_after(stage, [[(0, 0, 1.0, 0)] * 2])
    batch = responses([(0, 5, 1.0, 0), (0, 5, 0.0, 0), (1, 6, 1.0, 0), (0, 7, 1.0, 4)])
    assert values_of(stage.report(batch, settled(stage, batch, state=state)[0], state)) == {
        "known": 0.25,
        "expected_pass_rate": (3 / 4 + 1 / 2) / 2,
        "pass_rate": (1 / 2 + 1) / 2,
    }


def test_no_order_of_the_rewards_changes_a_bit_of_the_evidence():
    """Sums of 0.1, 1/3 and so on depend on their order: in float64 these have several values."""
    rewards = [0.1, 1 / 3, 0.7, 0.01, 1e-9, 0.3, 0.6, 0.123]
    stage, dice = Goldilocks(pool=1), random.Random(0)
    sums, states = set(), set()
    for _ in range(30):
        dice.shuffle(rewards)
        sums.add(functools.reduce(operator.add, rewards))  # sum() makes up for roundings since Python 3.12
        _, state = settled(stage, *(responses([(0, group, reward, 0)]) for group, reward in enumerate(rewards)))
        states.add((float(state["right"]), float(state["wrong"])))
    assert len(sums) > 1
    assert len(states) == 1


def test_values_that_differ_by_a_rounding_are_equal():
    """Each of the two comes first about as often; by one more decimal the larger always does."""
    rollouts = [offer(1, rollout=place) for place in range(400)]
    for apart, share in ((1e-12, 0.5), (1e-7, 0.0)):
        values = torch.tensor([0.3, 0.3 + apart], dtype=torch.float64)
        first = sum(int(best_first(rollout, values)[0] == 0) for rollout in rollouts) / 400
        assert abs(first - share) <= 5 * (share * (1 - share) / 400) ** 0.5


def test_what_is_taken_at_random_does_not_depend_on_which_of_equal_ones_were_taken():
    """Two equal prompts: whichever comes first by value, the other order puts each in front half of the time."""
    rollouts = [offer(1, rollout=place) for place in range(400)]
    agree = sum(int(best_first(rollout, torch.zeros(2))[0] == shuffled(rollout, 2)[0]) for rollout in rollouts) / 400
    assert abs(agree - 0.5) < 5 * 0.5 / 20


@pytest.mark.parametrize(
    ("selector", "asked", "text"),
    [
        (Uniform(), offer(16), "'uniform' draws from a finite pool"),
        (Uniform(pool=12), offer(16), "'uniform' .*pool has 12"),
        (Uniform(), offer(16, size=12), "'uniform' .*task has 12"),
        (Uniform(pool=30), offer(16, size=20), "'uniform': pool = 30"),
        (Goldilocks(pool=12), offer(16), "'goldilocks' .*pool has 12"),
        (Paced(pool=30), offer(16, size=20), "'paced': pool = 30"),
        (GoldilocksTeacher(pool=12), offer(16), "'goldilocks_teacher' .*pool has 12"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused(selector, asked, text):
    with pytest.raises(ValueError, match=text):
        selector.select(asked, selector.init_state())


def test_a_prompt_outside_of_the_pool_is_refused():
    with pytest.raises(ValueError, match="'paced': pool = 4, and the prompt 4 was answered"):
        settled(Paced(pool=4), responses([(0, 0, 1.0, 0), (4, 1, 1.0, 0)]))
