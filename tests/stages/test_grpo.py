"""GRPO's advantages against sums by hand."""

from __future__ import annotations

import pytest

from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.grpo import GRPO
from rlstab.testing.tolerances import REORDERED
from tests.stages.estimating import advantages, batch, by_group, drawn


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("epsilon", [1e-4, 0.5])
def test_every_advantage_by_hand(seed: int, ddof: int, epsilon: float) -> None:
    whole = drawn(seed, graded=True)
    (found,) = advantages(GRPO(ddof=ddof, epsilon=epsilon), whole)  # type: ignore[arg-type]
    for places in by_group(whole):
        rewards = [float(whole.rewards[one]) for one in places]
        mean = sum(rewards) / len(rewards)
        spread = (sum((one - mean) ** 2 for one in rewards) / max(len(rewards) - ddof, 1)) ** 0.5
        for place, reward in zip(places, rewards, strict=True):
            expected = 0.0 if max(rewards) == min(rewards) else (reward - mean) / (spread + epsilon)
            assert float(found[place]) == pytest.approx(expected, abs=10 * REORDERED)


def test_without_a_division_it_is_dr_grpo() -> None:
    whole = drawn(0, graded=True)
    assert advantages(GRPO(std=False), whole)[0].tolist() == advantages(DrGRPO(), whole)[0].tolist()


def test_the_unit_of_the_rewards_does_not_matter() -> None:
    small = advantages(GRPO(epsilon=1e-12), batch([1.0, 0.0, 0.0]))[0]
    assert advantages(GRPO(epsilon=1e-12), batch([100.0, 0.0, 0.0]))[0].tolist() == pytest.approx(small.tolist())
