"""The variance of group gradients from inner products, against the gradients themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.opob_variance import GROUP, coefficients, regrouped, spread_moments
from tests.stages.estimating import batch


def test_moments_are_those_of_the_gradients_themselves() -> None:
    torch.manual_seed(0)
    per, permutations = 3 * GROUP, 5
    vectors = torch.randn(per, 7, dtype=torch.float64)
    whole = batch([0.0] * per)
    groups, order = regrouped(whole, permutations, torch.Generator().manual_seed(1))
    assert sorted(order[:per].tolist()) == list(range(per))
    assert groups.groups == 3 * permutations
    pulls = torch.randn(per * permutations, dtype=torch.float64)
    found = spread_moments(coefficients(pulls, order, permutations, per), vectors @ vectors.T)

    own, different = [], []
    for start in range(0, per * permutations, per):
        sums = [
            sum((pulls[one] * vectors[order[one]] for one in range(first, first + GROUP)), torch.zeros(7))
            for first in range(start, start + per, GROUP)
        ]
        own += [float(one @ one) for one in sums]
        different += [float(one @ two) for one, two in itertools.permutations(sums, 2)]
    signal = sum(different) / len(different)
    assert found.signal == pytest.approx(signal)
    assert found.variance == pytest.approx(sum(own) / len(own) - signal)


def test_of_one_gradient_for_all_there_is_no_variance() -> None:
    per = 2 * GROUP
    spread = coefficients(torch.full((per,), 1 / GROUP, dtype=torch.float64), torch.arange(per), 1, per)
    found = spread_moments(spread, torch.full((per, per), 4.0, dtype=torch.float64))
    assert (found.variance, found.signal) == (0.0, 4.0)
