"""Leave-one-out advantages against sums by hand."""

from __future__ import annotations

import pytest

from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.rloo import RLOO
from rlstab.testing.tolerances import REORDERED
from tests.stages.estimating import advantages, batch, by_group, drawn


@pytest.mark.parametrize("seed", range(2))
def test_every_advantage_by_hand(seed: int) -> None:
    whole = drawn(seed, graded=True)
    (found,) = advantages(RLOO(), whole)
    for places in by_group(whole):
        for one in places:
            others = [float(whole.rewards[other]) for other in places if other != one]
            expected = float(whole.rewards[one]) - sum(others) / len(others) if others else 0.0
            assert float(found[one]) == pytest.approx(expected, abs=REORDERED)


def test_of_a_pair_it_is_twice_dr_grpo() -> None:
    pair = batch([1.0, 0.0])
    assert advantages(RLOO(), pair)[0].tolist() == (2 * advantages(DrGRPO(), pair)[0]).tolist() == [1.0, -1.0]
