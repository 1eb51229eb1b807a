"""Which values to remove so that the mean of the others fits a budget; values of several ranks stay on their rank.

As in :mod:`rlstab.core.order_statistics`, the bits of a number of at least 0 are an integer in the order of the
numbers. A histogram over the exponents, then over eleven more bits of the values in the bin where the mean passes the
budget, and so on, finds the value. Only counts and sums travel: six reductions of at most 48 KB, for any number of
values. Mantissas are summed in two halves, exactly for up to 2^26 values, so that no split can change a decision.
"""

from fractions import Fraction

import torch
from torch import Tensor

from rlstab.core.comm import Rounds, Sum
from rlstab.core.order_statistics import selection

#: Bits of a float64 below its sign, of its mantissa, of half of that with the bit that is not stored, of one pass.
BITS, MANTISSA, HALF, DIGIT = 63, 52, 26, 11
#: The smallest float64 above 0 is 1 / UNIT; sums of floats are integer multiples of it.
UNIT = 2**1074


def beyond_budget(values: Tensor, budget: float, local: bool) -> Rounds[tuple[float | None, int, int]]:
    """The smallest value to remove, largest first, so that the mean of the rest is at most ``budget``.

    Equal values are removed together, and the smallest value stays.

    Args:
        values: ``(n,)`` numbers of at least 0 on this rank, on the CPU.
        budget: a finite number.
        local: nothing travels.

    Returns:
        In rounds, the value, or None if nothing is removed; the number of values over all ranks; how many are removed.
    """
    keys = (values.double() + 0.0).view(torch.int64)
    limit = Fraction(budget) * UNIT
    size, stay, total = 0, 0, 0  # count and sum of what stays
    first, left = 0, BITS  # the known bits of the value, and the number of unknown ones
    while left:
        width = min(DIGIT, left)
        left -= width
        digits = (keys >> left) & ((1 << width) - 1)
        # counts, and the sums of both halves of the mantissas
        mantissas = keys & (1 << MANTISSA) - 1 | (keys >> MANTISSA > 0).long() << MANTISSA
        columns = (None, mantissas >> HALF, mantissas & (1 << HALF) - 1)
        sums = yield Sum(torch.stack([torch.bincount(digits, column, 1 << DIGIT).double() for column in columns]))
        counts, highs, lows = sums.long().tolist()
        size = size or sum(counts)
        for digit, count in enumerate(counts):
            exponent = (first << width | digit) << left >> MANTISSA
            added = (highs[digit] << HALF) + lows[digit] << max(exponent, 1) - 1
            if count and total + added > limit * (stay + count):
                break
            stay, total = stay + count, total + added
        else:
            return None, size, 0
        first, keys = first << width | digit, keys[digits == digit]
    if stay:
        return float(torch.tensor(first).view(torch.float64)), size, size - stay
    # even the smallest value is beyond the budget; it stays, and the next larger one is removed
    selected = yield from selection({"": (values.double(), lambda size: [count + 1] if size > count else [])}, local)
    after = selected[""].values
    return (after[0], size, size - count) if after else (None, size, 0)
