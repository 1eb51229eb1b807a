"""AR: a weight that is the published factor on the advantage."""

from __future__ import annotations

import math

import pytest

from rlstab import AR, ClipHigher
from tests.zoo.pulls import pulls

OLD = [[math.log(q) for q in (0.9, 0.5, 0.1, 1e-20)]] * 2


@pytest.mark.parametrize("clip", [(), (ClipHigher(dual_clip=3.0),)], ids=["plain", "clipped"])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.25, 1.3, 4.0])
def test_it_is_the_reweighted_advantage_wherever_a_surrogate_reads_its_sign(
    clip: tuple[ClipHigher, ...], ratio: float
) -> None:
    weights = [0.3 * q + 0.7 for q in (0.9, 0.5, 0.1, 1e-20)]
    ratios = [[ratio] * 4] * 2
    found = pulls(AR(), *clip, ratios=ratios, advantages=[1.5, -0.5], old=OLD)
    reweighted = [[A * w for w in weights] for A in (1.5, -0.5)]
    expected = pulls(*clip, ratios=ratios, advantages=reweighted, old=OLD)
    assert found.flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-14)
    free = not clip or 0.8 <= ratio <= 1.28
    if free:
        assert found[0].tolist() == pytest.approx([1.5 * ratio * w for w in weights], rel=1e-14)
