"""Advantages of plain tensors by hand; those of the stages, by group and by sums, are in tests/stages."""

from __future__ import annotations

import itertools
import math
from functools import partial, reduce
from operator import add

import pytest
import torch

from rlstab.errors import ShapeError
from rlstab.stages.advantages import dr_grpo, grpo, rloo
from rlstab.testing.tolerances import REORDERED

ESTIMATORS = {
    "grpo": grpo,
    "grpo, ddof 0": partial(grpo, ddof=0),
    "grpo without std": partial(grpo, std=False),
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}
every = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)


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
        (rloo, (2.0, -2 / 3, -2 / 3, -2 / 3)),  # 1 - (-1); -1 - (1 - 1 - 1) / 3
    ],
)
def test_one_right_of_four(estimator, expected):
    assert advantages(estimator, (1.0, -1.0, -1.0, -1.0)) == pytest.approx(expected, rel=REORDERED)


def test_epsilon_of_verl_makes_one_right_answer_of_eight_larger_by_3e_4():
    ours, theirs = (advantages(partial(grpo, **one), [1.0] + [0.0] * 7)[0] for one in ({}, {"epsilon": 1e-6}))
    assert theirs / ours - 1 == pytest.approx(2.8e-4, rel=0.02)


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
def test_equal_rewards_give_exactly_nothing(estimator):
    # the mean of equal rewards can miss them; one by one, since sum() compensates from Python 3.12 on
    assert reduce(add, [0.1] * 7) / 7 != 0.1
    for value, size in itertools.product((0.0, 1.0, -1.0, 0.1, -0.1, 1 / 3, 1e30), (1, 2, 3, 7, 10)):
        assert advantages(estimator, [value] * size) == [0.0] * size, (value, size)
    assert advantages(estimator, [], []) == []


@every
def test_whole_numbers_and_halves_are_taken(estimator):
    rewards = torch.tensor([1, 0, 0])
    expected = estimator(rewards.double(), torch.zeros(3, dtype=torch.int64))
    assert expected.dtype == torch.float64
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        assert torch.equal(estimator(rewards.to(dtype), torch.zeros(3, dtype=torch.int64)), expected)


@every
@pytest.mark.parametrize("shapes", [((3,), (2,)), ((2, 2), (2, 2))])
def test_shapes_that_do_not_fit_are_refused(estimator, shapes):
    with pytest.raises(ShapeError, match=r"rewards are .* and group_ids .*; expected"):
        estimator(torch.zeros(shapes[0]), torch.zeros(shapes[1], dtype=torch.int64))
