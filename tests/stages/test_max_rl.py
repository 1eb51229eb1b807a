"""MaxRL: divided by the mean reward, against sums by hand."""

from __future__ import annotations

import pytest

from rlstab.errors import Conflict, OutOfRange
from rlstab.stages.max_rl import MaxRL
from rlstab.stages.pipeline import check_exclusions
from rlstab.testing.tolerances import REORDERED
from tests.stages.estimating import advantages, batch, by_group, drawn


@pytest.mark.parametrize("seed", range(2))
def test_every_advantage_by_hand(seed: int) -> None:
    whole = drawn(seed, graded=seed % 2 == 0)
    (found,) = advantages(MaxRL(), whole)
    for places in by_group(whole):
        rewards = [float(whole.rewards[one]) for one in places]
        mean = sum(rewards) / len(rewards)
        expected = [one / mean - 1 if max(rewards) > min(rewards) else 0.0 for one in rewards]
        assert found[places].tolist() == pytest.approx(expected, abs=10 * REORDERED)


def test_one_success_of_n_pulls_as_n_less_1() -> None:
    for size in (2, 3, 8, 64):
        (found,) = advantages(MaxRL(), batch([1.0] + [0.0] * (size - 1)))
        assert found.tolist() == pytest.approx([size - 1] + [-1.0] * (size - 1))


def test_a_group_without_a_success_has_nothing() -> None:
    assert advantages(MaxRL(), batch([0.0] * 4))[0].tolist() == [0.0] * 4


def test_negative_rewards_are_refused() -> None:
    with pytest.raises(OutOfRange) as caught:
        advantages(MaxRL(), batch([1.0, -0.5]))
    assert str(caught.value) == (
        "'max_rl': a reward is -0.5, expected at least 0: advantages are divided by the mean reward of a group. Give "
        "rewards of at least 0, or take the estimator 'dr_grpo'."
    )


def test_penalties_are_refused_before_the_run() -> None:
    with pytest.raises(Conflict, match="the stage 'max_rl' and the stage 'overlong' exclude each other: advantages"):
        check_exclusions([MaxRL()], {"overlong": "stage"})
