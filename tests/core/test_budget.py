"""The bound of a budget: exact, and by counts and sums alone."""

import random
from fractions import Fraction

import pytest
import torch

from rlstab import M2PO, compose, make_plan
from rlstab.core.budget import beyond_budget
from rlstab.core.comm import LocalComm, carried_out
from tests.core.steps import batch_of, token


class Watched(LocalComm):
    """Counts what travels; no value may."""

    def __init__(self):
        self.sent = []

    def sum(self, values):
        self.sent.append(values.numel())
        return values

    def gather(self, values):
        assert values.numel() < 2, "values travel"
        return values


def by_fractions(values, budget):
    """Drop the largest value, all equal ones with it, until the mean fits."""
    left, gone = sorted(values), None
    while left and left[0] < left[-1] and sum(map(Fraction, left)) > Fraction(budget) * len(left):
        gone, left = left[-1], [value for value in left if value < left[-1]]
    return gone, len(values), len(values) - len(left)


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_is_that_of_exact_sums(seed):
    """Also where the mean is the budget itself, which sums in float64 miss: seven times 0.1 over seven is not 0.1."""
    dice = random.Random(seed)
    for _ in range(40):
        scale = dice.choice([1e-320, 1e-9, 0.1, 1e6])
        values = [scale * dice.choice([0.0, 1.0, 2.0, dice.random()]) for _ in range(dice.randint(0, 30))]
        for budget in (0.0, 0.1 * scale, scale, 1e300, *values[:1]):
            bound = carried_out(beyond_budget(torch.tensor(values, dtype=torch.float64), budget, True), LocalComm())
            assert bound == by_fractions(values, budget)
    same = beyond_budget(torch.full((7,), 0.1, dtype=torch.float64), 0.1, True)
    assert carried_out(same, LocalComm()) == (None, 7, 0)


def test_what_travels_for_m2po_does_not_grow_with_the_tokens():
    sent = []
    for count in (40, 8000):
        rows = [[token(sampled=-0.01 * (place % 97)) for place in range(count)]]
        sent.append(Watched())
        batch = batch_of(rows)
        assert (make_plan(compose(M2PO()), [batch], comm=sent[-1]).terms(batch).weight == 0).any()
    assert 0 < sum(sent[0].sent) == sum(sent[1].sent) < 64_000
