"""PACED-RL's scheduler: prompts by the distance of their expected pass rate from a target."""

import pytest
import torch

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.stages.goldilocks import Goldilocks
from rlstab.stages.paced import Paced
from tests.stages.selections import fill, offer, responses
from tests.stages.test_goldilocks import evidence, rollouts_of, state_after


@pytest.mark.parametrize("target", [0.5, 0.2, 0.9])
@pytest.mark.parametrize("random_share", [0.0, 0.3])
@pytest.mark.parametrize(("first", "count"), [(0, 5), (5, 4), (9, 14)])
def test_the_selection_equals_the_oracle(target, random_share, first, count):
    rollouts = rollouts_of(11, 4, seed=4)
    stage = Paced(pool=11, target=target, discount=0.9, random_share=random_share)
    values = [-abs((1 + right) / (2 + right + wrong) - target) for right, wrong in evidence(rollouts, 11, 0.9)]
    found = stage.select(offer(count, first=first, rollout=4, seed=6), state_after(stage, rollouts)).tolist()
    assert found == fill(values, first + count, random_share, seed=6, rollout=4)[first:]


def test_it_counts_as_goldilocks_does():
    rollouts = rollouts_of(7, 5, seed=1)
    one, other = (state_after(cls(pool=7), rollouts) for cls in (Paced, Goldilocks))
    assert all(torch.equal(one[key], other[key]) for key in ("right", "wrong"))


def test_prompts_at_the_same_distance_on_both_sides_are_equal():
    """A quarter and three quarters: over many rollouts each comes first about as often."""
    state = {"right": torch.tensor([0.0, 2.0]).double(), "wrong": torch.tensor([2.0, 0.0]).double()}
    stage = Paced(pool=2, random_share=0.0)
    first = [int(stage.select(offer(1, rollout=rollout), state)) for rollout in range(400)]
    assert abs(sum(first) / 400 - 0.5) < 5 * 0.5 / 20


def test_at_one_half_the_whole_pool_is_asked_before_any_prompt_comes_again():
    stage, state, shown = Paced(pool=12, random_share=0.0), None, []
    state = stage.init_state()
    for rollout in range(3):
        prompts = stage.select(offer(4, rollout=rollout), state).tolist()
        shown += prompts
        rows = [(prompt, group, float(one < 3), 0) for group, prompt in enumerate(prompts) for one in range(4)]
        state = measure_all(stage, [responses(rows)], state, LocalComm())[1]
    assert sorted(shown) == list(range(12))
