"""Blockwise advantages against loops over groups, blocks and outcomes."""

from __future__ import annotations

import pytest
import torch

from rlstab.core.stats import Settled
from rlstab.stages.blockwise import Blockwise
from rlstab.stages.dr_grpo import DrGRPO
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


def test_one_block_with_the_reward_of_the_response_is_dr_grpo() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5]
    given = batch(
        rewards,
        [0, 0, 0, 1, 1],
        extra={
            "block_rewards": [[one] for one in rewards],
            "block_outcomes": [[1]] * 5,
            "block_ids": torch.zeros(5, 3, dtype=torch.int64),
        },
    )
    expected = advantages(DrGRPO(), given)[0]
    torch.testing.assert_close(advantages(Blockwise(), given)[0], expected.unsqueeze(-1).expand(5, 3))


def of_two(seconds: list[float], firsts: list[int]) -> torch.Tensor:
    """The advantages of the second blocks of one group."""
    given = batch(
        [0.0] * len(seconds),
        extra={
            "block_rewards": [[0.0, one] for one in seconds],
            "block_outcomes": [[one, 1] for one in firsts],
            "block_ids": [[0, 1]] * len(seconds),
        },
    )
    return advantages(Blockwise(), given)[0][:, 1]


def test_a_block_is_compared_only_after_the_same_outcome() -> None:
    assert of_two([1.0, 0.0, 5.0, 3.0], [2, 2, 1, 1]).tolist() == [0.5, -0.5, 1.0, -1.0]


def test_a_block_without_siblings_has_nothing() -> None:
    assert of_two([1.0, 0.0, 5.0], [1, 2, 3]).tolist() == [0.0, 0.0, 0.0]


def test_a_response_that_lacks_a_block_is_not_in_its_mean() -> None:
    given = batch(
        [0.0] * 3,
        extra={
            "block_rewards": [[0.0, 1.0], [0.0, 0.5], [0.0, 0.0]],
            "block_outcomes": [[1, 1], [1, 1], [1, 0]],  # rows padded with 0 have no more blocks
            "block_ids": [[0, 1], [0, 1], [0, -1]],
        },
    )
    assert advantages(Blockwise(), given)[0][:, 1].tolist() == [0.25, -0.25, 0.0]


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
