"""CE-GPPO: what a clip would stop pulls with a constant."""

from __future__ import annotations

import math

import pytest

from rlstab import CEGPPO, ClipHigher
from tests.core.steps import token
from tests.zoo.coefficients import coefficients

RATIOS = (0.01, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0, 9.0, 11.0)


def both_signs(ratios: tuple[float, ...] = RATIOS) -> list[list[dict[str, float]]]:
    return [[token(drift=math.log(ratio), A=A) for ratio in ratios] for A in (2.0, -2.0)]


@pytest.mark.parametrize("dual", [None, 10.0])
def test_beyond_the_bounds_the_pull_is_constant(dual: float | None) -> None:
    up, down = 2 * 0.5 * 1.2, -2 * 0.75 * 0.8
    rewarded = [2 * ratio if ratio <= 1.2 else up for ratio in RATIOS]
    punished = [down if ratio < 0.8 else 0.0 if dual and ratio > dual else -2 * ratio for ratio in RATIOS]
    method = CEGPPO(pull_high=0.5, dual_clip=dual)
    assert coefficients(method, both_signs()) == pytest.approx([*rewarded, *punished], rel=1e-14)


@pytest.mark.parametrize("dual", [None, 3.0])
def test_without_a_pull_beyond_the_bounds_it_is_the_clip(dual: float | None) -> None:
    clip = ClipHigher(low=0.2, high=0.28, dual_clip=dual)
    method = CEGPPO(low=0.2, high=0.28, pull_low=0.0, pull_high=0.0, dual_clip=dual)
    assert coefficients(method, both_signs()) == pytest.approx(coefficients(clip, both_signs()), rel=1e-15)


def test_ratios_of_fifty_nats_are_finite() -> None:
    far = both_signs((math.exp(50.0), math.exp(-50.0)))
    assert all(math.isfinite(one) for one in coefficients(CEGPPO(dual_clip=10.0), far))
