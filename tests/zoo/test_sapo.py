"""SAPO: its coefficient is the slope of the published surrogate."""

import math

import pytest
import torch

from rlstab import SAPO
from tests.zoo.coefficients import RATIOS, coefficients, extremes, row


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize(("positive", "negative"), [(1.0, 1.05), (2.0, 0.5)])
def test_the_coefficient_is_the_slope_of_the_printed_surrogate(advantage, positive, negative):
    tau = positive if advantage > 0 else negative
    gap = torch.tensor([math.log(one) for one in RATIOS], dtype=torch.float64, requires_grad=True)
    (4 / tau * torch.sigmoid(tau * (gap.exp() - 1)) * advantage).sum().backward()
    found = coefficients([SAPO(positive, negative)], [row(RATIOS, advantage)])
    assert found == pytest.approx(gap.grad.tolist(), rel=1e-12, abs=1e-14)


def test_half_of_the_pull_is_left_where_the_card_says():
    rows = [row([1 + 1.762747 / 2, 1 - 1.762747 / 2], advantage) for advantage in (1.0, -1.0)]
    found = coefficients([SAPO(2.0, 2.0)], rows)
    ratios = [1.8813735, 0.1186265] * 2
    assert [abs(one) / ratio for one, ratio in zip(found, ratios, strict=True)] == pytest.approx([0.5] * 4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_tokens_neither_overflow_nor_pull(dtype):
    found = coefficients([SAPO(1.0, 200.0)], extremes(), dtype=dtype)
    assert [found[place] for place in (0, 5, 6, 7, 12, 13)] == [0.0] * 6
    assert found[3] == -found[10] == pytest.approx(1.5, rel=1e-6)
