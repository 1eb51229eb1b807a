"""Prompts at random from a pool: every prompt, and every pair of prompts, equally often."""

from collections import Counter

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


def test_every_prompt_and_every_pair_comes_equally_often():
    """3 of 6 in 2000 rollouts: a prompt in half of them, a pair in a fifth; five standard errors are allowed."""
    rollouts = 2000
    shown = [sorted(Uniform(pool=6).select(offer(3, rollout=one), {}).tolist()) for one in range(rollouts)]
    single = Counter(prompt for prompts in shown for prompt in prompts)
    pairs = Counter((one, two) for prompts in shown for one in prompts for two in prompts if one < two)
    assert len(single) == 6
    assert len(pairs) == 15
    for counts, share in ((single, 1 / 2), (pairs, 1 / 5)):
        error = (share * (1 - share) / rollouts) ** 0.5
        assert all(abs(found / rollouts - share) < 5 * error for found in counts.values())
