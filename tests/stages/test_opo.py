"""OPO: a baseline weighed by length, against sums by hand."""

from __future__ import annotations

import pytest

from rlstab.core.stats import Settled
from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.opo import OPO
from rlstab.testing.tolerances import REORDERED
from tests.stages.estimating import advantages, batch, by_group, drawn


@pytest.mark.parametrize("seed", range(2))
def test_every_advantage_by_hand(seed: int) -> None:
    whole = drawn(seed, graded=True)
    (found,) = advantages(OPO(), whole)
    for places in by_group(whole):
        pairs = [(float(whole.lengths[one]), float(whole.rewards[one])) for one in places]
        baseline = sum(length * reward for length, reward in pairs) / sum(length for length, _ in pairs)
        assert found[places].tolist() == pytest.approx([reward - baseline for _, reward in pairs], abs=REORDERED)


def test_of_equal_lengths_it_is_dr_grpo() -> None:
    same = batch([1.0, 0.0, 0.5, 1.0], lengths=[4.0] * 4)
    assert advantages(OPO(), same)[0].tolist() == pytest.approx(advantages(DrGRPO(), same)[0].tolist(), abs=REORDERED)


def test_a_group_without_a_token_has_nothing() -> None:
    assert advantages(OPO(), batch([1.0, 0.0], lengths=[0.0, 0.0]))[0].tolist() == [0.0, 0.0]


def test_it_reports_how_far_length_moves_the_baseline() -> None:
    found = OPO().report(batch([1.0, 0.0, 1.0], [0, 0, 1], [3.0, 1.0, 5.0]), Settled(), {})
    assert found["baseline_shift"].value == 0.25  # 3 / 4 less 1 / 2; the lone response is not counted
    assert float(found["baseline_shift"].count) == 2
