"""Selection by radix against sorting: any values, any cut into ranks, three sums of at most 32 KB."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstab.core import compare, order_statistics
from rlstab.core.comm import Gather, LocalComm, carried_out
from rlstab.core.order_statistics import selection
from rlstab.core.stats import Pool

quick = settings(max_examples=12, deadline=None, derandomize=True, database=None)
KB = 1024
SMALLEST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def nothing_is_few(monkeypatch):
    monkeypatch.setattr(order_statistics, "FEW", 0)


def over_ranks(asked_by_rank):
    """What each rank selects, the bytes of each sum, and those that each rank gathered."""
    rounds, results = [selection(asked, local=False) for asked in asked_by_rank], [None] * len(asked_by_rank)
    answers, sums, gathered = [None] * len(rounds), [], []
    while None in results:
        requests = []
        for rank, search in enumerate(rounds):
            try:
                requests.append(search.send(answers[rank]))
            except StopIteration as end:
                results[rank] = end.value
        assert len(requests) in (0, len(rounds))  # every rank asks, and for the same
        for request in requests:
            assert request.values.dtype == torch.float64
            assert type(request) is type(requests[0])
        values = [request.values for request in requests]
        if values and isinstance(requests[0], Gather):
            gathered += [8 * own.numel() for own in values]
            answers = [torch.cat(values)] * len(rounds)
        elif values:
            sums.append(8 * values[0].numel())
            answers = [torch.stack(values).sum(0)] * len(rounds)
    return results, sums, gathered


def of(values, *ranks):
    return {"set": (values, lambda size: ranks if size else ())}


def bits(values):
    """So that 0.0 and -0.0 differ."""
    return [struct.pack("<d", value) for value in values]


def expected(values, *ranks):
    ascending = sorted(values.double().tolist(), key=lambda value: (math.isnan(value), value))
    return [ascending[rank - 1] + 0.0 for rank in ranks]


def check(values, *ranks, few=False):
    """By three ranks of which one is empty, by one rank, and by a process alone."""
    cut = values.numel() // 3
    shares = [values[cut:], values[:0], values[:cut]]
    by_three, sums, gathered = over_ranks([of(share, *ranks) for share in shares])
    assert len(sums) == (1 if few else 6 if values.dtype == torch.float64 else 3)
    assert max(sums) <= 32 * KB
    assert gathered == ([8 * share.numel() for share in shares] if few else [])
    by_one = over_ranks([of(values, *ranks)])[0]
    alone = carried_out(selection(of(values, *ranks), local=True), LocalComm())
    for selected in (*by_three, *by_one, alone):
        assert selected["set"].size == values.numel()
        assert bits(selected["set"].values) == bits(expected(values, *ranks))


VALUES = {
    "normal": lambda draw: torch.randn(300, generator=draw, dtype=torch.float64),
    "ties": lambda draw: torch.randint(-3, 4, (300,), generator=draw).double() / 3,
    "all equal": lambda draw: torch.full((50,), -0.7, dtype=torch.float64),
    "any magnitude": lambda draw: torch.randn(300, generator=draw).double() * 10.0 ** torch.arange(-30, 30).repeat(5),
    "neighbours": lambda draw: 1 + torch.randint(0, 5, (99,), generator=draw).double() * 2.0**-23,
    "three": lambda draw: torch.tensor([0.5, -2.0, 7.0], dtype=torch.float64),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VALUES)
def test_every_order_statistic_is_that_of_sorting(monkeypatch, name, dtype):
    monkeypatch.setattr(compare, "CHUNK", 70)
    values = VALUES[name](torch.Generator().manual_seed(1)).to(dtype)
    kept, size = values.clone(), values.numel()
    for rank in {1, 2, size // 3, size // 2, size - 1}:
        check(values, rank, rank + 1)
    check(values, 1, size)
    assert torch.equal(values, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_at_the_edge(dtype):
    tiny, info = SMALLEST[dtype], torch.finfo(dtype)
    edge = [0.0, -0.0, tiny, -tiny, 3 * tiny, info.tiny, -info.tiny, info.max, info.min, math.inf, -math.inf, 1.0, -1.0]
    values = torch.tensor(edge, dtype=dtype)
    for rank in range(1, len(edge)):
        check(values, rank, rank + 1)
    nan = torch.tensor([math.nan, 1.0, math.inf, -math.inf], dtype=dtype)
    nan = torch.cat([nan, -nan[:1]])  # of either sign
    ordered = over_ranks([of(nan, 1, 2, 3, 4, 5)])[0][0]["set"].values
    assert ordered[:3] == [-math.inf, 1.0, math.inf]
    assert all(map(math.isnan, ordered[3:]))


@quick
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=40), st.data())
def test_any_floats(numbers, data):
    rank = data.draw(st.integers(1, len(numbers) - 1))
    for dtype in DTYPES:
        check(torch.tensor(numbers, dtype=dtype), rank, rank + 1)


def test_ranks_with_two_dtypes_go_on_in_the_wider_and_empty_ones_have_no_say():
    none, narrow = torch.zeros(0), torch.tensor([1.0, 0.1, -3.0])
    wide = torch.tensor([0.1, 1 + 1e-13], dtype=torch.float64)
    for rank in range(1, 5):
        results, sums, _ = over_ranks([of(narrow, rank, rank + 1), of(wide, rank, rank + 1)])
        both = torch.cat([narrow.double(), wide])
        assert all(selected["set"].values == expected(both, rank, rank + 1) for selected in results)
        assert len(sums) == 7
    results, sums, _ = over_ranks([of(none, 1, 2), of(wide, 1, 2)])
    assert all(selected["set"].values == wide.tolist() for selected in results)
    assert len(sums) == 6
    results, sums, _ = over_ranks([of(none), of(none.double())])
    assert all((selected["set"].size, selected["set"].values) == (0, []) for selected in results)
    assert len(sums) == 1


def test_several_sets_share_their_sums():
    draw = torch.Generator().manual_seed(2)
    narrow, wide = torch.randn(500, generator=draw), torch.randn(70, generator=draw).double()
    asked = [
        {
            "wide": (wide[share::2], lambda size: (size // 2, size // 2 + 1)),
            "narrow": (narrow[share::2], lambda size: (size,)),
            "none": (narrow[:0], lambda size: ()),
        }
        for share in (0, 1)
    ]
    results, sums, _ = over_ranks(asked)
    for selected in results:
        assert selected["wide"].values == expected(wide, 35, 36)
        assert selected["narrow"].values == expected(narrow, 500)
        assert selected["none"].size == 0
    assert len(sums) == 6
    assert max(sums) <= 3 * 32 * KB


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_values_are_gathered_after_the_first_sum(monkeypatch, dtype):
    values = VALUES["ties"](torch.Generator().manual_seed(1)).to(dtype)
    values[:3] = -0.0
    for limit in (values.numel(), values.numel() - 1):
        monkeypatch.setattr(order_statistics, "FEW", limit)
        for rank in (1, 120, 150, 180, values.numel() - 1):
            check(values, rank, rank + 1, few=limit == values.numel())
    few, many = torch.arange(10.0), torch.arange(11.0)
    monkeypatch.setattr(order_statistics, "FEW", 10)
    asked = [{"few": of(own[:10], 4)["set"], "many": of(own, 4, 5)["set"]} for own in (many, many[:0])]
    asked[0]["few"] = of(few, 4)["set"]
    results, sums, gathered = over_ranks(asked)
    assert all((selected["few"].values, selected["many"].values) == ([3.0], [3.0, 4.0]) for selected in results)
    assert (len(sums), gathered) == (3, [80, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_asked_of_many_values(dtype):
    many = torch.ones(5000, dtype=dtype)
    for alone in (False, True):
        (selected,) = [carried_out(selection(of(many), alone), LocalComm())]
        assert (selected["set"].size, selected["set"].values) == (5000, [])
    asked = {"none": of(many)["set"], "some": of(many, 1, 5000)["set"]}
    assert [selected["some"].values for selected in over_ranks([asked, asked])[0]] == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("odd", "count"), [(0.0, 5000), (-1.0, 5000), pytest.param(1.0, 1 << 24, marks=pytest.mark.slow)]
)
def test_all_values_but_perhaps_one_are_equal(odd, count):
    values = torch.zeros(count)
    values[1234] = odd
    for pool, expected in (
        (Pool.largest(values, 1), max(odd, 0.0)),
        (Pool.largest(values, 2), 0.0),
        (Pool.top(values, 1.0), min(odd, 0.0)),
        (Pool.quantile(values, 0.5), 0.0),
    ):
        assert (pool.threshold().value, pool.threshold().size) == (expected, count)
