"""CISPO: the capped ratio is the coefficient, for both signs and at any distance."""

import math

import pytest
import torch

from rlstab import CISPO
from rlstab.errors import OutOfRange
from tests.core.says import says
from tests.zoo.coefficients import RATIOS, coefficients, extremes, row


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize(("cap", "floor"), [(1.2, None), (5.0, None), (1.28, 0.8), (1.0, 1.0)])
def test_the_coefficient_is_the_capped_ratio_times_the_advantage(advantage, cap, floor):
    expected = [min(max(ratio, floor or 0.0), cap) * advantage for ratio in RATIOS]
    assert coefficients([CISPO(cap, floor)], [row(RATIOS, advantage)]) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_beyond_the_clamp_pulls_no_more(dtype):
    found = coefficients([CISPO(5.0, 0.8)], extremes([1.5]), dtype=dtype)
    expected = [0.0, 0.8, math.exp(-0.1), 1.0, math.exp(0.1), 5.0, 0.0]
    assert found == pytest.approx([1.5 * one for one in expected], rel=1e-5)


def test_a_distance_from_one_is_refused_as_a_cap():
    with says(OutOfRange, "'cispo': cap = 0.2, expected float in [1, inf). The default is 5.0."):
        CISPO(cap=0.2)
