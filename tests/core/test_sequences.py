"""Arithmetic per sequence, against plain Python loops and numpy."""

import math

import numpy as np
import pytest
import torch

from rlstab import TokenBatch

LENGTHS = [3, 1, 0, 7, 12, 101, 2]


def of(sequence, position, rows):
    zeros, ids = torch.zeros(sequence.numel(), dtype=torch.float64), torch.arange(rows)
    return TokenBatch(zeros, zeros, zeros, sequence, position, ids, ids)


@pytest.fixture(params=["packed", "shuffled", "a single row", "rows of one length"])
def ragged(request):
    """A batch of sequences with random values and marks, and the values and marks of each row."""
    lengths = {"a single row": [1], "rows of one length": [5, 5]}.get(request.param, LENGTHS)
    draw, count = torch.Generator().manual_seed(0), sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    values = 3 * torch.randn(count, generator=draw, dtype=torch.float64)
    marks = torch.rand(count, generator=draw) < 0.5
    order = torch.randperm(count, generator=draw) if request.param == "shuffled" else torch.arange(count)
    rows = [(values[sequence == row].tolist(), marks[sequence == row].tolist()) for row in range(len(lengths))]
    return of(sequence[order], position[order], len(lengths)), values[order], marks[order], rows


def close(computed, expected, bound=101 * 2.0**-53 * 400):
    """A sum of at most 101 numbers in any order is off by at most 101 * 2^-53 of their absolute sum, below 400."""
    assert computed.dtype == torch.float64
    assert computed.tolist() == pytest.approx(expected, rel=0, abs=bound, nan_ok=True)


def test_sums_and_means_are_those_of_plain_loops(ragged):
    batch, values, marks, rows = ragged
    chosen = [[value for value, marked in zip(*row, strict=True) if marked] for row in rows]
    whole = [row for row, _ in rows]
    assert batch.lengths.tolist() == list(map(len, whole))
    assert batch.lengths.dtype == torch.float64
    for where, parts in ((None, whole), (marks, chosen)):
        # what stands outside the marks is not read
        spoiled = values if where is None else torch.where(where, values, math.nan)
        close(batch.sequence_total(spoiled, where), [math.fsum(part) for part in parts])
        close(batch.sequence_mean(spoiled, where), [math.fsum(part) / len(part) if part else 0.0 for part in parts])


def test_sums_are_float64_whatever_the_values_are():
    batch = of(torch.zeros(10_001, dtype=torch.int64), torch.arange(10_001), 1)
    tenth = torch.full((10_001,), 0.1)
    assert batch.sequence_mean(tenth).item() == pytest.approx(float(tenth[0]), rel=1e-14)
    assert batch.sequence_total(tenth > 0).tolist() == [10_001.0]
    assert batch.running_total(tenth.bfloat16())[-1].item() == pytest.approx(10_001 * float(tenth.bfloat16()[0]))


@pytest.mark.parametrize("q", [0.0, 0.1, 0.25, 0.5, 0.57, 0.8, 0.9, 1.0])
def test_quantiles_are_those_of_numpy(ragged, q):
    batch, values, _, rows = ragged
    expected = [float(np.quantile(row, q, method="linear")) if row else math.nan for row, _ in rows]
    # numpy interpolates by another formula: two roundings of numbers below 16
    close(batch.sequence_quantile(values, q), expected, bound=2e-15 * 16)


def test_a_quantile_that_falls_on_a_value_is_that_value():
    """0.57 * 100 is 56.99999999999999 in float64."""
    batch = of(torch.zeros(101, dtype=torch.int64), torch.arange(101), 2)
    values = torch.randperm(101, generator=torch.Generator().manual_seed(0)).double() ** 3
    computed = batch.sequence_quantile(values, 0.57)
    assert computed[0].item() == 57.0**3
    assert math.isnan(computed[1])


@pytest.mark.parametrize("decay", [1.0, 0.0, 0.5, 2 ** (-1 / 32), 1.5])
@pytest.mark.parametrize("reverse", [False, True])
def test_running_totals_are_those_of_plain_loops(ragged, reverse, decay):
    batch, values, _, rows = ragged
    expected = []
    for number, place in zip(batch.sequence.tolist(), batch.position.tolist(), strict=True):
        row = rows[number][0]
        those = row[place:] if reverse else row[: place + 1][::-1]
        expected.append(math.fsum(decay**k * value for k, value in enumerate(those)))
    size = sum(decay**k * 16 for k in range(max(len(row) for row, _ in rows)))
    close(batch.running_total(values, reverse=reverse, decay=decay), expected, bound=2e-15 * (1 + size))
    assert batch.index_in_sequence.tolist() == batch.position.tolist()


def test_responses_without_a_token_have_no_quantile():
    none = torch.zeros(0, dtype=torch.int64)
    assert of(none, none, 3).sequence_quantile(none, 0.5).isnan().tolist() == [True] * 3
