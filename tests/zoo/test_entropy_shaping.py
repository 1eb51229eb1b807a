"""Entropy shaping: the published advantage, which keeps its sign."""

from __future__ import annotations

import pytest

from rlstab import ClipHigher, EntropyShaping
from tests.zoo.pulls import pulls

ENTROPIES = [[0.0, 0.5, 1.25, 80.0]] * 3


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.2, 1.5])
def test_the_shaped_advantage_stands_in_the_surrogate(ratio: float) -> None:
    found = pulls(
        EntropyShaping(),
        ClipHigher(),
        ratios=[[ratio] * 4] * 3,
        advantages=[1.0, -0.8, 0.0],
        entropies=ENTROPIES,
    )
    up = [[1.0, 1.2, 1.5, 1.5], [0.0] * 4][ratio > 1.28]
    down = [[-0.8, -0.6, -0.4, -0.4], [0.0] * 4][ratio < 0.8]
    expected = [[ratio * one for one in row] for row in (up, down, [0.0] * 4)]
    for one, other in zip(found.tolist(), expected, strict=True):
        assert one == pytest.approx(other, rel=1e-14, abs=0)


def test_no_advantage_turns_around_at_the_smallest_kappa() -> None:
    method = EntropyShaping(alpha=1e6, kappa=1.0 + 1e-9)
    found = pulls(method, ratios=[[1.0] * 4] * 3, advantages=[1.0, -0.8, 0.0], entropies=ENTROPIES)
    assert (found[0] > 0).all()
    assert (found[1] < 0).all()
    assert not found[2].any()
