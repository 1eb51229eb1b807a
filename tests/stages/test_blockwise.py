"""Blockwise advantages against loops over groups, blocks and outcomes."""

from __future__ import annotations

import pytest
import torch

from rlstab.core.stats import Settled
from rlstab.stages.blockwise import Blockwise
from rlstab.testing.tolerances import REORDERED
from tests.stages.estimating import WIDTH, advantages, batch, by_group, drawn


@pytest.mark.parametrize("shrink", [0.0, 1.5])
@pytest.mark.parametrize("seed", range(2))
def test_every_advantage_by_hand(seed: int, shrink: float) -> None:
    whole = drawn(seed)
    rewards, outcomes, ids = (whole.extra[f"block_{name}"].tolist() for name in ("rewards", "outcomes", "ids"))
    (found,) = advantages(Blockwise(shrink=shrink), whole)
    compared = 0
    for places in by_group(whole):
        for one in places:
            for token in range(WIDTH):
                number, expected = ids[one][token], 0.0
                if number >= 0:
                    having = [other for other in places if outcomes[other][number]]
                    siblings = [
                        other
                        for other in having
                        if not number or outcomes[other][number - 1] == outcomes[one][number - 1]
                    ]
                    wide = sum(rewards[other][number] for other in having) / len(having)
                    total = sum(rewards[other][number] for other in siblings)
                    expected = rewards[one][number] - (total + shrink * wide) / (len(siblings) + shrink)
                    compared += 1
                assert float(found[one, token]) == pytest.approx(expected, abs=REORDERED)
    assert compared


def test_it_reports_blocks_without_siblings() -> None:
    given = batch(
        [0.0] * 3,
        extra={
            "block_rewards": torch.zeros(3, 2),
            "block_outcomes": [[1, 1], [1, 1], [2, 1]],
            "block_ids": [[0, 1]] * 3,
        },
    )
    found = Blockwise().report(given, Settled(), {})
    assert found["alone"].value == 1 / 6  # of six blocks the second of the last response
    assert found["blocks"].value == 2.0
