"""Arithmetic per sequence, against plain Python loops and numpy."""

import math

import numpy as np
import pytest
import torch

from rlstab import TokenBatch

LENGTHS = [[3, 1, 0, 7, 12], [0, 0, 4], [1], [5, 5], [101, 2, 40]]


def ragged(lengths, seed=0, *, shuffle=False):
    """A batch of sequences of these lengths with random values, and the values and marks of each."""
    draw = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(one) for one in lengths])
    values = 3 * torch.randn(count, generator=draw, dtype=torch.float64)
    marks = torch.rand(count, generator=draw) < 0.5
    order = torch.randperm(count, generator=draw) if shuffle else torch.arange(count)
    batch = of(sequence[order], position[order], len(lengths))
    rows = [values[sequence == row].tolist() for row in range(len(lengths))]
    marked = [marks[sequence == row].tolist() for row in range(len(lengths))]
    return batch, values[order], marks[order], rows, marked


def of(sequence, position, rows):
    zeros = torch.zeros(sequence.numel(), dtype=torch.float64)
    return TokenBatch(
        old_logprobs=zeros,
        logprobs=zeros,
        advantages=zeros,
        sequence=sequence,
        position=position,
        sequence_ids=torch.arange(rows),
        group_ids=torch.arange(rows),
    )


def close(found, expected):
    """A sum of at most 101 numbers in any order is off by at most 101 * 2^-53 of their absolute sum, below 400."""
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(expected, rel=0, abs=101 * 2.0**-53 * 400, nan_ok=True)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_sums_and_means_are_those_of_plain_loops(lengths, shuffle):
    batch, values, marks, rows, marked = ragged(lengths, shuffle=shuffle)
    chosen = [[x for x, there in zip(*pair, strict=True) if there] for pair in zip(rows, marked, strict=True)]
    assert batch.lengths.tolist() == lengths
    assert batch.lengths.dtype == torch.float64
    close(batch.sequence_total(values), [math.fsum(row) for row in rows])
    close(batch.sequence_total(values, marks), [math.fsum(row) for row in chosen])
    close(batch.sequence_mean(values), [math.fsum(row) / len(row) if row else 0.0 for row in rows])
    close(batch.sequence_mean(values, marks), [math.fsum(row) / len(row) if row else 0.0 for row in chosen])


def test_what_stands_outside_the_marks_is_not_read():
    batch, values, marks, *_ = ragged([4, 6, 3])
    spoiled = torch.where(marks, values, math.nan)
    assert torch.equal(batch.sequence_total(spoiled, marks), batch.sequence_total(values, marks))
    assert torch.equal(batch.sequence_mean(spoiled, marks), batch.sequence_mean(values, marks))


def test_sums_are_float64_whatever_the_values_are():
    batch = of(torch.zeros(10_001, dtype=torch.int64), torch.arange(10_001), 1)
    tenth = torch.full((10_001,), 0.1)
    assert batch.sequence_mean(tenth).item() == pytest.approx(float(tenth[0]), rel=1e-14)
    assert batch.sequence_total(tenth > 0).tolist() == [10_001.0]
    assert batch.running_total(tenth.bfloat16())[-1].item() == pytest.approx(10_001 * float(tenth.bfloat16()[0]))


@pytest.mark.parametrize("q", [0.0, 0.1, 0.25, 0.5, 0.57, 0.8, 0.9, 1.0])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_quantiles_are_those_of_numpy(lengths, shuffle, q):
    batch, values, _, rows, _ = ragged(lengths, shuffle=shuffle)
    expected = [float(np.quantile(row, q, method="linear")) if row else math.nan for row in rows]
    # numpy interpolates by another formula: two roundings of numbers below 16
    assert batch.sequence_quantile(values, q).tolist() == pytest.approx(expected, rel=0, abs=2e-15 * 16, nan_ok=True)


def test_a_quantile_that_falls_on_a_value_is_that_value():
    """0.57 * 100 is 56.99999999999999 in float64."""
    batch = of(torch.zeros(101, dtype=torch.int64), torch.arange(101), 2)
    values = torch.randperm(101, generator=torch.Generator().manual_seed(0)).double() ** 3
    found = batch.sequence_quantile(values, 0.57)
    assert found[0].item() == 57.0**3
    assert math.isnan(found[1])


def test_ties_do_not_move_a_quantile():
    batch = of(torch.tensor([0, 1, 0, 1, 0, 1]), torch.tensor([0, 0, 1, 1, 2, 2]), 2)
    values = torch.tensor([2.0, 5.0, 2.0, 5.0, 2.0, 1.0])
    assert batch.sequence_quantile(values, 0.5).tolist() == [2.0, 5.0]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_running_sums_are_those_of_plain_loops(lengths, shuffle, reverse):
    batch, values, _, rows, _ = ragged(lengths, shuffle=shuffle)
    expected = []
    for row, place in zip(batch.sequence.tolist(), batch.position.tolist(), strict=True):
        expected.append(math.fsum(rows[row][place:] if reverse else rows[row][: place + 1]))
    close(batch.running_total(values, reverse=reverse), expected)


@pytest.mark.parametrize("decay", [0.0, 0.5, 2 ** (-1 / 32), 1.5])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_running_totals_that_decay(lengths, reverse, decay):
    batch, values, _, rows, _ = ragged(lengths, shuffle=True)
    expected = []
    for row, place in zip(batch.sequence.tolist(), batch.position.tolist(), strict=True):
        those = rows[row][place:] if reverse else rows[row][: place + 1][::-1]
        expected.append(math.fsum(decay**k * one for k, one in enumerate(those)))
    size = sum(decay**k * 16 for k in range(max(lengths, default=0)))
    found = batch.running_total(values, reverse=reverse, decay=decay).tolist()
    assert found == pytest.approx(expected, rel=0, abs=2e-15 * (1 + size))


def test_spread_gives_each_token_the_value_of_its_sequence():
    batch, *_ = ragged([2, 0, 3], shuffle=True)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bool):
        values = torch.tensor([3, 0, 1]).to(dtype)
        found = batch.spread(values)
        assert found.dtype == dtype
        assert found.tolist() == [values[row].item() for row in batch.sequence.tolist()]


def test_nothing_has_sums_of_nothing():
    nothing = TokenBatch.empty()
    none = torch.zeros(0)
    assert nothing.num_sequences == 0
    for found in (nothing.lengths, nothing.sequence_total(none), nothing.sequence_mean(none), nothing.spread(none)):
        assert found.shape == (0,)
    assert nothing.sequence_quantile(none, 0.5).shape == nothing.running_total(none).shape == (0,)
    silent = of(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 3)
    assert silent.lengths.tolist() == silent.sequence_mean(none).tolist() == [0.0] * 3
    assert silent.sequence_quantile(none, 0.5).isnan().tolist() == [True] * 3
    assert silent.running_total(none, reverse=True).dtype == torch.float64
