"""PACED-RL's scheduler: prompts by the distance of their expected pass rate from a target."""

import pytest

from rlstab.stages.paced import Paced
from tests.stages.selections import fill, offer
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
