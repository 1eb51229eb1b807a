"""Dr. GRPO's advantages against sums by hand."""

from __future__ import annotations

import pytest

from rlstab.stages.dr_grpo import DrGRPO
from rlstab.testing.tolerances import REORDERED
from tests.stages.estimating import advantages, by_group, drawn


@pytest.mark.parametrize("seed", range(2))
def test_every_advantage_by_hand(seed: int) -> None:
    whole = drawn(seed, graded=True)
    (found,) = advantages(DrGRPO(), whole)
    for places in by_group(whole):
        rewards = [float(whole.rewards[one]) for one in places]
        expected = [one - sum(rewards) / len(rewards) for one in rewards]
        assert found[places].tolist() == pytest.approx(expected, abs=REORDERED)
