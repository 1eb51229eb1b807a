"""Advantages by hand."""

from __future__ import annotations

import math
from functools import partial, reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstab.errors import ShapeError
from rlstab.stages.advantages import dr_grpo, grpo, rloo
from rlstab.testing.tolerances import REORDERED
from tests.tolerances import rounding

ESTIMATORS = {
    "grpo": grpo,
    "grpo, ddof 0": partial(grpo, ddof=0),
    "grpo without std": partial(grpo, std=False),
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}
every = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
#: Up to 16 rewards below 103 (3 and a shift of 100) are added and taken from each other; what is left is divided by a
#: deviation of at least 0.02, that of one reward of 16 which is off by 0.1.
SHIFTED = rounding(torch.float64, 103 / 0.02, 2 * 16 + 8)
ONE_RIGHT = (1.0, -1.0, -1.0, -1.0)


def advantages(estimator, rewards, groups=None):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    groups = torch.zeros(len(rewards), dtype=torch.int64) if groups is None else torch.tensor(groups)
    return estimator(rewards, groups).tolist()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # mean -0.5, deviations 1.5 and -0.5, squares 2.25 + 3 * 0.25 = 3
        (partial(grpo, epsilon=0.0), (1.5, -0.5, -0.5, -0.5)),  # sqrt(3 / 3) = 1
        (partial(grpo, epsilon=0.0, ddof=0), (3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5))),  # sqrt(3 / 4)
        (partial(grpo, epsilon=0.5), (1.0, -1 / 3, -1 / 3, -1 / 3)),  # divided by 1.5
        (grpo, (1.5 / 1.0001, -0.5 / 1.0001, -0.5 / 1.0001, -0.5 / 1.0001)),
        (partial(grpo, std=False), (1.5, -0.5, -0.5, -0.5)),
        (dr_grpo, (1.5, -0.5, -0.5, -0.5)),
        # 1 - (-1); -1 - (1 - 1 - 1) / 3
        (rloo, (2.0, -2 / 3, -2 / 3, -2 / 3)),
    ],
)
def test_one_right_of_four(estimator, expected):
    assert advantages(estimator, ONE_RIGHT) == pytest.approx(expected, rel=REORDERED)


def test_groups_of_different_size_in_any_order_stay_apart():
    rewards, groups = [1.0, 0.0, 7.0, 0.0, 3.0, 0.5], [4, 9, 4, 4, -1, 9]
    # group 4: 1, 7, 0; group 9: 0, 0.5; group -1: alone
    assert advantages(dr_grpo, rewards, groups) == pytest.approx([-5 / 3, -0.25, 13 / 3, -8 / 3, 0, 0.25])
    assert advantages(rloo, rewards, groups) == pytest.approx([1 - 3.5, -0.5, 7 - 0.5, 0 - 4, 0, 0.5])
    spread = math.sqrt(((5 / 3) ** 2 + (13 / 3) ** 2 + (8 / 3) ** 2) / 2)
    assert advantages(partial(grpo, epsilon=0.0), rewards, groups) == pytest.approx(
        [-5 / 3 / spread, -(0.5**0.5), 13 / 3 / spread, -8 / 3 / spread, 0, 0.5**0.5]
    )


@every
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1, -0.1, 1 / 3, 1e30])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_equal_rewards_give_exactly_nothing(estimator, value, size):
    assert advantages(estimator, [value] * size) == [0.0] * size


def test_the_mean_of_equal_rewards_can_miss_them():
    # what makes the test above one that can fail; one by one, since sum() compensates from Python 3.12 on
    assert reduce(add, [0.1] * 7) / 7 != 0.1


@every
def test_no_response_gives_no_advantage(estimator):
    assert advantages(estimator, [], []) == []


@every
def test_whole_numbers_and_halves_are_taken(estimator):
    rewards = torch.tensor([1, 0, 0])
    expected = estimator(rewards.double(), torch.zeros(3, dtype=torch.int64))
    assert expected.dtype == torch.float64
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        assert torch.equal(estimator(rewards.to(dtype), torch.zeros(3, dtype=torch.int64)), expected)


@every
@pytest.mark.parametrize(
    ("rewards", "groups", "shapes"),
    [
        (torch.zeros(3), torch.zeros(2, dtype=torch.int64), "rewards are (3,) and group_ids (2,)"),
        (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64), "rewards are (2, 2) and group_ids (2, 2)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(estimator, rewards, groups, shapes):
    with pytest.raises(ShapeError) as caught:
        estimator(rewards, groups)
    assert str(caught.value) == f"{shapes}; expected (S,) for both."


rows = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0, 3.0]), st.integers(0, 3)), max_size=16)
quick = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@every
@quick
@given(rows=rows, random=st.randoms(use_true_random=False))
def test_the_order_of_the_responses_does_not_matter(estimator, rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    before = advantages(estimator, *[[row[which] for row in rows] for which in (0, 1)])
    after = advantages(estimator, *[[rows[place][which] for place in order] for which in (0, 1)])
    assert after == pytest.approx([before[place] for place in order], rel=0, abs=SHIFTED)


@every
@quick
@given(rows=rows, shift=st.floats(-100, 100))
def test_the_same_for_every_response_changes_nothing(estimator, rows, shift):
    rewards, groups = [row[0] for row in rows], [row[1] for row in rows]
    assert advantages(estimator, [one + shift for one in rewards], groups) == pytest.approx(
        advantages(estimator, rewards, groups), rel=0, abs=SHIFTED
    )


@every
@quick
@given(rows=rows)
def test_a_group_sums_to_nothing(estimator, rows):
    found = advantages(estimator, [row[0] for row in rows], [row[1] for row in rows])
    for group in {row[1] for row in rows}:
        total = sum(one for one, row in zip(found, rows, strict=True) if row[1] == group)
        assert total == pytest.approx(0, abs=SHIFTED)


@quick
@given(rows=rows)
def test_rloo_is_the_reward_less_the_mean_of_the_others(rows):
    found = advantages(rloo, [row[0] for row in rows], [row[1] for row in rows])
    for place, (reward, group) in enumerate(rows):
        others = [one for other, (one, where) in enumerate(rows) if where == group and other != place]
        assert found[place] == pytest.approx(reward - sum(others) / len(others) if others else 0, rel=0, abs=SHIFTED)
