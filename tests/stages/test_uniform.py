"""Prompts at random from a pool: every prompt, and every pair of prompts, equally often."""

import pytest

from rlstab.stages.uniform import Uniform
from tests.stages.selections import fill, offer


@pytest.mark.parametrize(("first", "count", "pool"), [(0, 4, 10), (4, 3, 10), (8, 9, 10), (0, 10, 10), (3, 40, 5)])
def test_equals_the_oracle(first, count, pool):
    found = Uniform(pool=pool).select(offer(count, first=first, rollout=2, seed=4), {})
    assert found.tolist() == fill([0.0] * pool, first + count, 1.0, seed=4, rollout=2)[first:]


def test_the_pool_of_a_task_with_an_end_is_the_task():
    asked = offer(5, rollout=1, size=9)
    assert Uniform().select(asked, {}).tolist() == Uniform(pool=9).select(asked, {}).tolist()
