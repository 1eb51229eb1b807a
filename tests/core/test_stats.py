import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstab import Mean, Pool
from rlstab.core.comm import LocalComm
from rlstab.core.stats import Grouped, merge, settle
from rlstab.testing.tolerances import REORDERED

quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)
coarse = st.lists(st.integers(-12, 12).map(lambda k: k / 4), min_size=1, max_size=30)


@quick
@given(coarse, st.floats(0, 1))
def test_quantile_interpolates_as_numpy_does(values, q):
    threshold = Pool.quantile(torch.tensor(values), q).threshold()
    assert threshold.value == pytest.approx(np.quantile(values, q), abs=REORDERED)
    assert threshold.size == len(values)
    distinct = torch.tensor(sorted(set(values)))
    threshold = Pool.quantile(distinct, q).threshold()
    assert threshold.reached(distinct).sum() == threshold.nominal


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
@given(coarse, st.integers(1, 100).map(lambda k: k / 100), st.sampled_from(["ceil", "floor", "count"]))
def test_the_kth_largest_is_reached_by_k_values_and_their_ties(numbers, share, rule):
    values, exact = torch.tensor(numbers), Fraction(repr(share)) * len(numbers)
    k = {"ceil": math.ceil(exact), "floor": max(1, math.floor(exact)), "count": math.ceil(40 * share)}[rule]
    pool = Pool.largest(values, k) if rule == "count" else Pool.top(values, share, rounding=rule)
    threshold, k = pool.threshold(), min(k, len(numbers))
    kth = sorted(numbers, reverse=True)[k - 1]
    assert (threshold.value, threshold.nominal, threshold.size) == (kth, k, len(numbers))
    assert threshold.reached(values).tolist() == [value >= kth for value in numbers]
    assert threshold.below(values).tolist() == [value < kth for value in numbers]


@pytest.mark.parametrize("make", [Pool.quantile, Pool.top, Pool.largest, Pool.beyond_budget])
def test_empty_pool_compares_as_nothing(make):
    threshold = make(torch.zeros(0), 1).threshold()
    values = torch.tensor([-1.0, 0.0, 1.0])
    assert (threshold.value, threshold.size, threshold.nominal) == (None, 0, 0)
    assert not threshold.below(values).any()
    assert not threshold.reached(values).any()
    assert math.isnan(threshold.report().value)


@quick
@given(coarse, coarse, coarse, st.floats(0, 1))
def test_summaries_are_commutative_monoids(first, second, third, q):
    def measured(numbers):
        values = torch.tensor(numbers)
        budget = Pool.beyond_budget(values.abs(), 1.0)
        grouped = Grouped.of((4 * values).long() % 3 + 2**60, values)
        return {"mean": Mean.of(values), "q": Pool.quantile(values, q), "budget": budget, "grouped": grouped}

    def settled(parts):
        stat = dict(settle(parts, LocalComm()))
        grouped = stat.pop("grouped")
        columns = [column.tolist() for column in (grouped.keys, grouped.totals, grouped.counts)]
        return {name: summary.value for name, summary in stat.items()} | {"grouped": columns}

    a, b, c = map(measured, (first, second, third))
    expected = settled([measured(first + second + third)])
    for parts in ([a, b, c], [c, a, b], [merge(merge(a, b), c)], [merge(a, merge(b, c))], [measured([]), b, a, c]):
        assert settled(parts) == expected


def test_mean_counts_what_it_is_told_to_in_float64():
    values = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    assert Mean.of(values).value == 3.0
    assert Mean.of(values, torch.tensor([True, False, True])).value == 3.5
    assert Mean.of(torch.tensor([True, False, False, True])).value == 0.5
    assert math.isnan(Mean.of(torch.zeros(0)).value)
    assert Mean.scalar(0.25).merge(Mean.scalar(0.25)).value == 0.25
    assert not Mean.of(values).total.requires_grad
    many = torch.full((10_001,), 0.1, dtype=torch.float32)
    assert Mean.of(many).value == pytest.approx(float(many[0]), rel=REORDERED)


def test_a_pool_keeps_its_values_as_they_are_and_empty_parts_have_no_say():
    values = torch.linspace(0, 1, 5, requires_grad=True)
    ((part, _),) = Pool.quantile(values, 0.5).parts
    assert part.data_ptr() == values.data_ptr()
    assert not part.requires_grad
    assert Pool.quantile(torch.arange(4), 0.5).threshold().value == 1.5
    assert Pool.top(torch.tensor([2**53, 2**53 - 1]), 0.5).threshold().value == 2**53
    some = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0], dtype=torch.float64)
    assert Pool.top(some, 0.5, some != 4).threshold().value == 3
    empty, close = Pool.top(torch.zeros(0), 0.5), Pool.top(torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64), 0.5)
    for parts in ([empty, close], [close, empty]):
        assert settle([{"pool": part} for part in parts], Twice())["pool"].value == 1.0 + 1e-12


FAR = [-(2**63), -(2**53) - 1, -(2**53), -1, 0, 2**32 - 1, 2**32, 2**53, 2**53 + 1, 2**63 - 1]


class Twice:
    """A group of two ranks that hold the same: sums double, and what is gathered stands twice."""

    def sum(self, values):
        return 2 * values

    def gather(self, values):
        assert values.dtype == torch.float64  # what a process group of floats can carry
        return torch.cat([values, values])


def test_keys_of_64_bits_survive_the_way_over_ranks():
    keys = torch.tensor(FAR)
    grouped = Grouped.of(keys, torch.arange(len(FAR)))
    settled = settle([{"x": grouped}], Twice()).grouped("x")
    assert settled.keys.tolist() == sorted(FAR)
    assert settled.mean(keys).tolist() == list(range(len(FAR)))
    assert settled.count(keys).tolist() == [2.0] * len(FAR)
    assert settled.total(keys).tolist() == [2.0 * place for place in range(len(FAR))]


def test_an_unknown_key_has_nothing():
    asked = torch.tensor([4, 5, -(2**63)])
    known = Grouped.of(torch.tensor([5, -3, 5]), torch.tensor([1.0, 2.0, 4.0]))
    assert (known.count(asked).tolist(), known.total(asked).tolist()) == ([0, 2, 0], [0, 5, 0])
    assert known.mean(asked)[[0, 2]].isnan().all()
    nothing = Grouped.of(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert nothing.count(asked).tolist() == nothing.total(asked).tolist() == [0.0] * 3
    assert nothing.mean(asked).isnan().all()


def test_values_are_summed_where_they_are_asked_to_be():
    keys, values = torch.tensor([1, 2, 1]), torch.tensor([0.5, math.nan, 2.0], requires_grad=True)
    some = settle([{"x": Grouped.of(keys, values, torch.tensor([True, False, True]))}], LocalComm()).grouped("x")
    assert (some.keys.tolist(), some.totals.tolist(), some.counts.tolist()) == ([1], [2.5], [2.0])
    assert not some.totals.requires_grad
    marked = Grouped.of(keys.int(), torch.tensor([True, False, True]))
    assert (marked.keys.dtype, marked.mean(keys).tolist()) == (torch.int64, [1.0, 0.0, 1.0])
