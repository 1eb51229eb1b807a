"""Selection by radix against sorting: any values, any cut into ranks, three sums of at most 32 KB."""

from __future__ import annotations

import math
import struct
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstab.core import compare
from rlstab.core import select as module
from rlstab.core.comm import LocalComm, carried_out
from rlstab.core.select import selection

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
KB = 1024
SMALLEST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def nothing_is_few(monkeypatch):
    monkeypatch.setattr(module, "FEW", 0)


def select(asked, comm):
    return carried_out(selection(asked, isinstance(comm, LocalComm)), comm)


class Meeting:
    """Ranks as threads; keeps the bytes of their sums, and of what each gathered."""

    def __init__(self, ranks):
        self.barrier, self.left, self.sizes = threading.Barrier(ranks, timeout=20), [None] * ranks, []
        self.gathered = []

    def rank(self, number):
        meeting = self

        class Comm:
            def exchange(self, values, sizes):
                assert values.dtype == torch.float64
                meeting.left[number] = values
                meeting.barrier.wait()
                seen = list(meeting.left)
                sizes.append(8 * values.numel())
                meeting.barrier.wait()
                return seen

            def sum(self, values):
                return torch.stack(self.exchange(values, meeting.sizes if number == 0 else [])).sum(0)

            def gather(self, values):
                return torch.cat(self.exchange(values, meeting.gathered))

        return Comm()


def over_ranks(asked_by_rank):
    """What each rank finds, and the bytes of the sums."""
    found, meeting = meet(asked_by_rank)
    assert meeting.gathered == []
    return found, meeting.sizes


def meet(asked_by_rank):
    meeting, found = Meeting(len(asked_by_rank)), [None] * len(asked_by_rank)

    def run(number):
        try:
            found[number] = select(asked_by_rank[number], meeting.rank(number))
        except BaseException as error:
            found[number] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(asked_by_rank))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found, meeting


def of(values, *ranks):
    return {"one": (values, lambda size: ranks if size else ())}


def bits(values):
    """So that 0.0 and -0.0 differ."""
    return [struct.pack("<d", one) for one in values]


def expected(values, *ranks):
    ascending = sorted(values.double().tolist(), key=lambda one: (math.isnan(one), one))
    return [ascending[rank - 1] + 0.0 for rank in ranks]


def check(values, *ranks):
    """By one rank, by three of which one is empty, and by a process alone."""
    assert bits(over_ranks([of(values, *ranks)])[0][0]["one"].values) == bits(expected(values, *ranks))
    cut = values.numel() // 3
    shares = [values[cut:], values[:0], values[:cut]]
    found, sizes = over_ranks([of(one, *ranks) for one in shares])
    assert len(sizes) == (6 if values.dtype == torch.float64 else 3)
    assert max(sizes) <= 32 * KB
    for one in (*found, select(of(values, *ranks), LocalComm())):
        assert one["one"].size == values.numel()
        assert bits(one["one"].values) == bits(expected(values, *ranks))


VALUES = {
    "normal": lambda draw: torch.randn(300, generator=draw, dtype=torch.float64),
    "ties": lambda draw: torch.randint(-3, 4, (300,), generator=draw).double() / 3,
    "all equal": lambda draw: torch.full((50,), -0.7, dtype=torch.float64),
    "any magnitude": lambda draw: torch.randn(300, generator=draw).double() * 10.0 ** torch.arange(-30, 30).repeat(5),
    "neighbours": lambda draw: 1 + torch.randint(0, 5, (99,), generator=draw).double() * 2.0**-23,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
def test_every_order_statistic_is_that_of_sorting(make, dtype):
    values = make(torch.Generator().manual_seed(1)).to(dtype)
    size = values.numel()
    for rank in {1, 2, size // 3, size // 2, size - 1}:
        check(values, rank, rank + 1)
        check(values, rank)
    check(values, 1, size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_at_the_edge(dtype):
    tiny, info = SMALLEST[dtype], torch.finfo(dtype)
    edge = [0.0, -0.0, tiny, -tiny, 3 * tiny, info.tiny, -info.tiny, info.max, info.min, math.inf, -math.inf, 1.0, -1.0]
    values = torch.tensor(edge, dtype=dtype)
    for rank in range(1, len(edge)):
        check(values, rank, rank + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_either_sign_is_above_every_number(dtype):
    values = torch.tensor([math.nan, 1.0, math.inf, -math.inf], dtype=dtype)
    values = torch.cat([values, values[:1].neg()])
    for ranks in ((1, 2), (3, 4), (4, 5)):
        found, _ = over_ranks([of(values, *ranks)])
        torch.testing.assert_close(
            torch.tensor(found[0]["one"].values), torch.tensor(expected(values, *ranks)), equal_nan=True, rtol=0, atol=0
        )


@quick
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40), st.data())
def test_any_floats(numbers, data):
    rank = data.draw(st.integers(1, len(numbers)))
    ranks = (rank,) if rank == len(numbers) else (rank, rank + 1)
    for dtype in DTYPES:
        check(torch.tensor(numbers, dtype=dtype), *ranks)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_few_values(size):
    values = torch.tensor([0.5, -2.0, 7.0])[:size]
    for rank in range(1, size + 1):
        check(values, rank)


def test_no_value_anywhere_takes_one_sum():
    found, sizes = over_ranks([of(torch.zeros(0)), of(torch.zeros(0, dtype=torch.float64))])
    assert all((one["one"].size, one["one"].values) == (0, []) for one in found)
    assert len(sizes) == 1
    assert select(of(torch.zeros(0)), LocalComm())["one"].values == []


def test_an_empty_rank_has_no_say_in_the_dtype():
    values = 1 + torch.arange(9, dtype=torch.float64) * 1e-13
    found, sizes = over_ranks([of(torch.zeros(0), 4, 5), of(values, 4, 5)])
    assert all(list(one["one"].values) == values[3:5].tolist() for one in found)
    assert len(sizes) == 6


def test_ranks_with_two_dtypes_go_on_in_the_wider():
    narrow, wide = torch.tensor([1.0, 0.1, -3.0]), torch.tensor([0.1, 1 + 1e-13], dtype=torch.float64)
    ascending = expected(torch.cat([narrow.double(), wide]), 1, 2, 3, 4, 5)
    for rank in range(1, 5):
        found, sizes = over_ranks([of(narrow, rank, rank + 1), of(wide, rank, rank + 1)])
        assert all(list(one["one"].values) == ascending[rank - 1 : rank + 1] for one in found)
        assert len(sizes) == 7


def test_several_sets_share_their_sums():
    draw = torch.Generator().manual_seed(2)
    one, other = torch.randn(500, generator=draw), torch.randn(70, generator=draw).double()

    def asked(share):
        return {
            "wide": (other[share::2], lambda size: (size // 2, size // 2 + 1)),
            "narrow": (one[share::2], lambda size: (size,)),
            "none": (one[:0], lambda size: ()),
        }

    found, sizes = over_ranks([asked(0), asked(1)])
    for rank in found:
        assert list(rank["wide"].values) == expected(other, 35, 36)
        assert list(rank["narrow"].values) == expected(one, 500)
        assert rank["none"].size == 0
    assert len(sizes) == 6
    assert max(sizes) <= 3 * 32 * KB


def test_values_are_looked_at_in_chunks(monkeypatch):
    monkeypatch.setattr(compare, "CHUNK", 7)
    values = torch.randn(100, generator=torch.Generator().manual_seed(3))
    check(values, 40, 41)
    kept = values.clone()
    select(of(values, 3), Meeting(1).rank(0))
    assert torch.equal(values, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_values_are_gathered_after_the_first_sum(monkeypatch, dtype):
    values = VALUES["ties"](torch.Generator().manual_seed(1)).to(dtype)
    values[:3] = -0.0
    size = values.numel()
    for limit, sums, gathered in ((size, 1, [0, 800, 1600]), (size - 1, 6 if dtype == torch.float64 else 3, [])):
        monkeypatch.setattr(module, "FEW", limit)
        for rank in (1, 120, 150, 180, size - 1):
            wanted = rank, rank + 1
            found, meeting = meet([of(one, *wanted) for one in (values[:100], values[:0], values[100:])])
            for one in (*found, select(of(values, *wanted), LocalComm())):
                assert one["one"].size == size
                assert bits(one["one"].values) == bits(expected(values, *wanted))
            assert len(meeting.sizes) == sums
            assert sorted(meeting.gathered) == gathered


def test_few_and_many_in_one_step(monkeypatch):
    monkeypatch.setattr(module, "FEW", 10)
    few, many = torch.arange(10.0), torch.arange(11.0)
    asked = {**{f"few {name}": one for name, one in of(few, 4).items()}, **of(many, 4, 5)}
    found, meeting = meet([asked, {"few one": of(few[:0], 4)["one"], **of(many[:0], 4, 5)}])
    assert all((one["few one"].values, one["one"].values) == ([3.0], [3.0, 4.0]) for one in found)
    assert (len(meeting.sizes), sorted(meeting.gathered)) == (3, [0, 80])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_stay_on_their_device(dtype):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(5)).to(dtype)
    found = select(of(values.cuda(), 70_000, 70_001), LocalComm())
    assert list(found["one"].values) == expected(values, 70_000, 70_001)
