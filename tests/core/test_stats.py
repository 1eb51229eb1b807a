import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstab import Mean, Pool
from rlstab.core import select
from rlstab.core.comm import LocalComm
from rlstab.core.stats import merge, settle
from rlstab.testing.tolerances import REORDERED

quick = settings(max_examples=100, deadline=None, derandomize=True, database=None)
coarse = st.lists(st.integers(-12, 12).map(lambda k: k / 4), min_size=1, max_size=30)
shares = st.integers(1, 100).map(lambda k: k / 100)


@quick
@given(coarse, st.floats(0, 1))
def test_quantile_interpolates_as_numpy_and_torch_do(values, q):
    threshold = Pool.quantile(torch.tensor(values), q).threshold()
    assert threshold.value == pytest.approx(np.quantile(values, q), abs=REORDERED)
    assert threshold.value == pytest.approx(
        torch.quantile(torch.tensor(values, dtype=torch.float64), q).item(), abs=REORDERED
    )
    assert threshold.size == len(values)


@pytest.mark.parametrize(
    ("q", "n", "place"), [(0.57, 101, 57), (0.29, 101, 29), (1 - 0.9, 11, 1), (1 - 0.2, 6, 4), (0.07, 101, 7)]
)
def test_a_place_that_rounding_missed_is_the_order_statistic_itself(q, n, place):
    values = torch.linspace(0, 1, n, dtype=torch.float64)
    threshold = Pool.quantile(values.flip(0), q).threshold()
    assert threshold.value == values[place]
    assert threshold.reached(values).sum() == threshold.nominal == n - place


@pytest.mark.parametrize(("share", "n"), [(0.28, 10**8), (0.57, 10**8), (0.54, 31_000_000), (0.01, 31_000_000)])
def test_places_are_exact_in_pools_of_any_size(share, n):
    whole = Fraction(repr(share)) * n
    none = torch.zeros(0)
    assert Pool.top(none, share)._ranks(n) == (n + 1 - whole,)
    assert Pool.top(none, share, rounding="floor")._ranks(n) == (n + 1 - whole,)
    assert Pool.quantile(none, share)._ranks(n + 1) == (whole + 1,)


@quick
@given(coarse, shares, st.sampled_from(["ceil", "floor"]))
def test_top_share_reaches_the_kth_largest_with_its_ties(values, share, rounding):
    exact = Fraction(repr(share)) * len(values)
    k = max(1, math.ceil(exact) if rounding == "ceil" else math.floor(exact))
    expected = sorted(values, reverse=True)[k - 1]
    threshold = Pool.top(torch.tensor(values), share, rounding=rounding).threshold()
    assert (threshold.value, threshold.nominal, threshold.size) == (expected, k, len(values))
    assert threshold.reached(torch.tensor(values)).tolist() == [value >= expected for value in values]
    assert threshold.below(torch.tensor(values)).tolist() == [value < expected for value in values]


@quick
@given(coarse, st.integers(1, 30))
def test_the_kth_largest_is_reached_by_k_values_and_their_ties(values, count):
    found = Pool.largest(torch.tensor(values, dtype=torch.float64), count).threshold()
    assert found.value == sorted(values, reverse=True)[min(count, len(values)) - 1]
    assert found.nominal == min(count, len(values))


@quick
@given(coarse, st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0, 1e9]), st.integers(0, 30))
def test_the_smallest_values_stay_within_a_budget(values, budget, cut):
    """As one would do by hand: drop the largest value, all equal ones with it, until the mean fits."""
    values = [abs(one) for one in values]
    left, gone = sorted(values), []
    while left and left[0] < left[-1] and math.fsum(left) / len(left) > budget:
        gone = [one for one in left if one == left[-1]] + gone
        left = [one for one in left if one < left[-1]]
    parts = [
        Pool.beyond_budget(torch.tensor(some, dtype=torch.float64), budget) for some in (values[:cut], values[cut:])
    ]
    found = parts[0].merge(parts[1]).threshold()
    assert found.size == len(values)
    assert found.nominal == len(gone)
    assert found.value == (min(gone) if gone else None)


@quick
@given(coarse, st.integers(0, 100).map(lambda k: k / 100))
def test_nominal_is_how_many_reach_a_quantile_when_nothing_ties(values, q):
    distinct = torch.tensor(sorted(set(values)))
    threshold = Pool.quantile(distinct, q).threshold()
    assert threshold.reached(distinct).sum() == threshold.nominal


@pytest.mark.parametrize(
    "pool",
    [
        Pool.quantile(torch.zeros(0), 0.5),
        Pool.top(torch.zeros(0), 0.5),
        Pool.largest(torch.zeros(0), 3),
        Pool.beyond_budget(torch.zeros(0), 0.5),
    ],
)
def test_empty_pool_compares_as_nothing(pool):
    threshold = pool.threshold()
    values = torch.tensor([-1.0, 0.0, 1.0])
    assert (threshold.value, threshold.size, threshold.nominal) == (None, 0, 0)
    assert not threshold.below(values).any()
    assert not threshold.reached(values).any()
    assert math.isnan(threshold.report().value)


def test_comparison_is_in_float64_whatever_the_dtype():
    values = torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16)
    threshold = Pool.quantile(values, 0.5).threshold()
    assert threshold.reached(values).tolist() == [False, True, True]
    assert threshold.below(values.float()).tolist() == [True, False, False]
    neighbours = torch.tensor([1.0, 1.0]).nextafter(torch.tensor([1.0, 2.0]))
    between = Pool.quantile(neighbours, 0.5).threshold()
    assert between.reached(neighbours).tolist() == [False, True]
    assert between.below(neighbours).tolist() == [True, False]


@quick
@given(coarse, coarse, coarse, st.floats(0, 1))
def test_summaries_are_commutative_monoids(one, other, third, q):
    def pools(values):
        values = torch.tensor(values)
        return {"mean": Mean.of(values), "pool": Pool.quantile(values, q), "top": Pool.top(values, max(q, 0.01))}

    def settled(parts):
        found = settle(parts, LocalComm())
        return {name: one.value for name, one in found.items()}

    a, b, c = pools(one), pools(other), pools(third)
    expected = settled([pools(one + other + third)])
    for parts in ([a, b, c], [c, a, b], [merge(merge(a, b), c)], [merge(a, merge(b, c))], [pools([]), b, a, c]):
        assert settled(parts) == expected


def test_mean_counts_what_it_is_told_to():
    values = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    assert Mean.of(values).value == 3.0
    assert Mean.of(values, torch.tensor([True, False, True])).value == 3.5
    assert Mean.of(torch.tensor([True, False, False, True])).value == 0.5
    assert math.isnan(Mean.of(torch.zeros(0)).value)
    assert Mean.scalar(0.25).merge(Mean.scalar(0.25)).value == 0.25
    assert not Mean.of(values).total.requires_grad


def test_mean_adds_in_float64():
    many = torch.full((10_001,), 0.1, dtype=torch.float32)
    assert Mean.of(many).value == pytest.approx(float(many[0]), rel=REORDERED)


class Through:
    """A group of one that is not taken for a process alone, and remembers the bytes of its sums."""

    def __init__(self):
        self.sizes = []

    def sum(self, values):
        self.sizes.append(values.numel() * values.element_size())
        return values

    def gather(self, values):
        return values


@pytest.mark.parametrize(("dtype", "sums"), [(torch.float32, 3), (torch.float64, 6), (torch.bfloat16, 3)])
def test_the_pools_of_a_step_share_their_sums(monkeypatch, dtype, sums):
    monkeypatch.setattr(select, "FEW", 0)
    values = torch.linspace(-1, 1, 41).to(dtype)
    stat = {"mean": Mean.of(values), "one": Pool.quantile(values, 0.33), "two": Pool.top(values, 0.1)}
    comm = Through()
    found = settle([stat, stat], comm)
    assert len(comm.sizes) == 1 + sums
    assert max(comm.sizes) <= 2 * 32 * 1024
    assert dict(found) == dict(settle([stat, stat], LocalComm())) | {"mean": found["mean"]}
    assert found["one"].size == 82


def test_empty_parts_have_no_say_in_the_dtype():
    empty, values = Pool.top(torch.zeros(0), 0.5), torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    for parts in ([empty, Pool.top(values, 0.5)], [Pool.top(values, 0.5), empty]):
        assert settle([{"pool": one} for one in parts], Through())["pool"].value == 1.0 + 1e-12


def test_a_pool_keeps_its_values_as_they_are():
    values = torch.linspace(0, 1, 5, requires_grad=True)
    (part,) = Pool.quantile(values, 0.5).parts
    assert part.data_ptr() == values.data_ptr()
    assert not part.requires_grad
    assert Pool.quantile(torch.arange(4), 0.5).threshold().value == 1.5
    big = torch.tensor([2**53, 2**53 - 1])
    assert Pool.top(big, 0.5).threshold().value == 2**53
