"""The bound of a budget: exact, and by counts and sums alone."""

import random
from fractions import Fraction

import pytest
import torch

from rlstab import M2PO, compose, make_plan
from rlstab.core.comm import LocalComm, carried_out
from rlstab.core.mean_within import beyond_budget
from rlstab.testing.run import in_threads
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


def test_the_bound_is_that_of_exact_sums():
    """Also where the mean is the budget itself, which sums in float64 miss: seven times 0.1 over seven is not 0.1."""
    dice = random.Random(0)
    for _ in range(25):
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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_many_equal_values_beyond_the_budget(ranks):
    """More of them than are gathered: none goes where all are equal, all but the smallest where one is smaller."""
    for other, expected in (
        ([], (None, 0)),
        ([0.5], (0.5, 1)),
        ([0.125], (0.25, 5000)),
        ([0.125, 0.5], (0.25, 5001)),
    ):
        values = torch.cat([torch.full((5000,), 0.25), torch.tensor(other)]).double()
        value, size, gone = over_ranks([values[rank::ranks] for rank in range(ranks)], 0.04)
        assert (value, gone) == expected
        assert size == 5000 + len(other)
    assert over_ranks([torch.zeros(0)] * ranks, 0.04) == (None, 0, 0)
    assert over_ranks([torch.full((5000,), 0.03)] * ranks, 0.04) == (None, 5000 * ranks, 0)


@pytest.mark.slow
def test_as_many_equal_values_as_a_large_step_has():
    for other, expected in (([], (None, 0)), ([0.125], (0.25, 1 << 24))):
        value, _, gone = over_ranks([torch.cat([torch.full((1 << 24,), 0.25), torch.tensor(other)])], 0.04)
        assert (value, gone) == expected


def over_ranks(shares, budget):
    """What every rank settles on, each a thread."""

    def settle(rank, comm):
        return carried_out(beyond_budget(shares[rank], budget, len(shares) == 1), comm)

    first, *others = in_threads(len(shares), settle)
    assert all(other == first for other in others)
    return first
