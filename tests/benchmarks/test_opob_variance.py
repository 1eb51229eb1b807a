"""The variance of group gradients from inner products, against the gradients themselves."""

import itertools

import pytest
import torch

from benchmarks.opob_variance import GROUP, across, coefficients, regrouped, spread_moments
from tests.stages.responses import batch


def test_moments_are_those_of_the_gradients_themselves() -> None:
    torch.manual_seed(0)
    per, permutations = 3 * GROUP, 5
    vectors = torch.randn(per, 7, dtype=torch.float64)
    whole = batch([0.0] * per)
    groups, order = regrouped(whole, permutations, torch.Generator().manual_seed(1))
    assert sorted(order[:per].tolist()) == list(range(per))
    assert groups.groups == 3 * permutations
    pulls = torch.randn(per * permutations, dtype=torch.float64)
    others = torch.randn(per * permutations, dtype=torch.float64)
    spread, reference = (coefficients(each, order, permutations, per) for each in (pulls, others))
    moments = spread_moments(spread, reference, vectors @ vectors.T)

    def sums(by: torch.Tensor, start: int) -> list[torch.Tensor]:
        return [
            sum((by[row] * vectors[order[row]] for row in range(first, first + GROUP)), torch.zeros(7))
            for first in range(start, start + per, GROUP)
        ]

    own, different, crossed = [], [], []
    for start in range(0, per * permutations, per):
        here, there = sums(pulls, start), sums(others, start)
        own += [float(pull @ pull) for pull in here]
        different += [float(pull @ two) for pull, two in itertools.permutations(here, 2)]
        crossed += [float(here[mine] @ there[other]) for mine, other in itertools.permutations(range(3), 2)]
    signal = sum(different) / len(different)
    assert moments.signal == pytest.approx(signal)
    assert moments.variance == pytest.approx(sum(own) / len(own) - signal)
    assert moments.along == pytest.approx(sum(crossed) / len(crossed))


def test_products_across_prompts() -> None:
    first, other = (torch.randn(4, 5, dtype=torch.float64) for _ in range(2))
    expected = sum(float(first[place] @ other[two]) for place, two in itertools.permutations(range(4), 2))
    assert across(first, other) == pytest.approx(expected)
