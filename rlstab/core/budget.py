"""Which values have to go for the mean of the others to fit a budget; they may lie on several ranks, and stay there.

As in :mod:`rlstab.core.select`, the bits of a number of at least 0 are an integer in the order of the numbers. A
histogram over the exponents, then over eleven more bits of the values in the bin where the mean passes the budget, and
so on, says where it does. What travels are counts and sums: six reductions of at most 48 KB, whatever the number of
values. A sum is that of the mantissas, in two halves, so it is exact up to 2^26 values: no cut can change a decision.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from rlstab.core.comm import Rounds, Sum
from rlstab.core.select import selection

#: Bits of a float64 below its sign, of its mantissa, of half of that with the bit that is not stored, of one pass.
BITS, MANTISSA, HALF, DIGIT = 63, 52, 26, 11
#: The least float64 above 0 is 1 / UNIT: as multiples of it, sums of floats are integers.
UNIT = 2**1074


def beyond_budget(values: Tensor, budget: float, alone: bool) -> Rounds[tuple[float | None, int, int]]:
    """The smallest value that has to go, largest first, for the mean of what is left to be at most ``budget``.

    Equal values go together, and the smallest value stays.

    Args:
        values: ``(n,)`` numbers of at least 0 on this rank, on the CPU.
        budget: a finite number.
        alone: nothing travels.

    Returns:
        In rounds, the value, or None where nothing has to go; the number of values over all ranks; how many of them go.
    """
    keys = (values.double() + 0.0).view(torch.int64)
    limit = Fraction(budget) * UNIT
    size, stay, total = 0, 0, 0  # of what stays: how many, and their sum
    first, left = 0, BITS  # the bits that are known of the value, and how many are not
    while left:
        width = min(DIGIT, left)
        left -= width
        digits = (keys >> left) & ((1 << width) - 1)
        sums = yield Sum(_histogram(keys, digits))
        counts, highs, lows = sums.long().tolist()
        size = size or sum(counts)
        for digit, count in enumerate(counts):
            exponent = (first << width | digit) << left >> MANTISSA
            more = (highs[digit] << HALF) + lows[digit] << max(exponent, 1) - 1
            if count and total + more > limit * (stay + count):
                break
            stay, total = stay + count, total + more
        else:
            return None, size, 0
        first, keys = first << width | digit, keys[digits == digit]
    if stay:
        return float(torch.tensor(first).view(torch.float64)), size, size - stay
    # already the smallest value is beyond it, and stays: the next larger one goes
    selected = yield from selection({"": (values.double(), lambda size: [count + 1] if size > count else [])}, alone)
    after = selected[""].values
    return (after[0], size, size - count) if after else (None, size, 0)


def _histogram(keys: Tensor, digits: Tensor) -> Tensor:
    """``(3, 2^DIGIT)`` float64: counts, and the sums of both halves of the mantissas."""
    mantissas = keys & (1 << MANTISSA) - 1 | (keys >> MANTISSA > 0).long() << MANTISSA
    columns = (None, mantissas >> HALF, mantissas & (1 << HALF) - 1)
    return torch.stack([torch.bincount(digits, column, 1 << DIGIT).double() for column in columns])
