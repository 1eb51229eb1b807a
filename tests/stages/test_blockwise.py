"""Blockwise advantages against loops over groups, blocks and outcomes."""

import itertools

import pytest

from rlstab.core.stats import Settled
from rlstab.stages.blockwise import Blockwise
from rlstab.testing.tolerances import REORDERED
from tests.stages.responses import WIDTH, advantages, batch, by_group, drawn, values_of


@pytest.mark.parametrize("shrink", [0.0, 1.5])
@pytest.mark.parametrize("seed", range(2))
def test_every_advantage_by_hand(seed: int, shrink: float) -> None:
    whole = drawn(seed)
    rewards, outcomes, ids = (whole.extra[f"block_{name}"].tolist() for name in ("rewards", "outcomes", "ids"))
    (given,) = advantages(Blockwise(shrink=shrink), whole)
    for places in by_group(whole):
        for own, token in itertools.product(places, range(WIDTH)):
            number, expected = ids[own][token], 0.0
            if number >= 0:
                having = [place for place in places if outcomes[place][number]]
                before = [outcomes[place][number - 1] if number else None for place in range(len(whole))]
                siblings = [rewards[place][number] for place in having if before[place] == before[own]]
                wide = sum(rewards[place][number] for place in having) / len(having)
                expected = rewards[own][number] - (sum(siblings) + shrink * wide) / (len(siblings) + shrink)
            assert float(given[own, token]) == pytest.approx(expected, abs=REORDERED)


def test_it_reports_blocks_without_siblings() -> None:
    given = batch([0.0] * 3, extra={"block_outcomes": [[1, 1], [1, 1], [2, 1]]})
    # of six blocks the second of the last response
    assert values_of(Blockwise().report(given, Settled(), {})) == {"alone": 1 / 6, "blocks": 2.0}
