"""MASPO: its gate at hand-worked points: which side, which width, and the cap where it has none."""

import math

import pytest
import torch

from rlstab import MASPO
from tests.core.steps import token
from tests.zoo.coefficients import RATIOS, coefficients, extremes


def tokens(ratios, advantage, old):
    """Tokens of one old log-prob."""
    return [{**token(now=old, A=advantage), "logp": old + math.log(ratio)} for ratio in ratios]


@pytest.mark.parametrize("old", [-1e-9, -2.0, -30.0])
@pytest.mark.parametrize("advantage", [2.0, -0.5])
def test_what_moves_back_pulls_in_full_and_what_moves_away_by_its_width(advantage, old):
    width = min(math.exp(-0.3 * old), 10.0) * (1.06 if advantage > 0 else 1 / 1.015)
    expected = []
    for ratio in RATIOS:
        away = ratio > 1 if advantage > 0 else ratio < 1
        expected.append(ratio * advantage * (math.exp(-((ratio - 1) ** 2) / (2 * width**2)) if away else 1.0))
    assert coefficients([MASPO()], [tokens(RATIOS, advantage, old)]) == pytest.approx(expected, rel=1e-11, abs=1e-13)


def test_the_defaults_keep_what_the_card_says():
    found = [coefficients([MASPO(positive=0.0)], [tokens([2.0], 1.0, old)])[0] / 2 for old in (0.0, math.log(0.01))]
    assert found == pytest.approx([0.61, 0.97], abs=5e-3)


@pytest.mark.parametrize(("advantage", "scale"), [(1e6, 10.0), (-1e6, 0.1)])
def test_the_scale_is_bounded_on_both_sides(advantage, scale):
    ratio = 1 + 0.2 * math.copysign(1.0, advantage)
    found = coefficients([MASPO()], [tokens([ratio], advantage, -1e-9)])[0]
    assert found / (ratio * advantage) == pytest.approx(math.exp(-0.04 / (2 * scale**2)), rel=1e-8)


def test_the_cap_bounds_punished_tokens_that_grow_and_nothing_else():
    for advantage in (1.0, -1.0):
        free, capped = (coefficients([MASPO(cap=cap)], [tokens(RATIOS, advantage, -2.0)]) for cap in (None, 3.0))
        expected = [-3.0 if advantage < 0 and ratio > 3 else one for ratio, one in zip(RATIOS, free, strict=True)]
        assert capped == pytest.approx(expected, rel=1e-13)
        assert (capped != free) == (advantage < 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", [MASPO(), MASPO(sigma=1e-30, max_sigma=1e-30, alpha=50.0, cap=2.0)])
def test_far_tokens_are_finite(method, dtype):
    found = coefficients([method], extremes(), dtype=dtype)
    assert all(math.isfinite(one) for one in found)
    assert found[5] == 0.0  # rewarded at e^20
    assert found[12] == pytest.approx(-1.5 * (math.exp(20) if method.cap is None else 2.0), rel=1e-6)
