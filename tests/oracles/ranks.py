"""Order statistics by sorting. Shares are read as the decimals they are written as: no rank is off by one."""

import math
from fractions import Fraction


def quantile(values, q):
    """Linear interpolation at place q (n - 1) of the ascending values; None of nothing."""
    if not values:
        return None
    ascending = sorted(values)
    place = q * (len(values) - 1)
    below = math.floor(place)
    if place == below:
        return ascending[below]
    return ascending[below] + (ascending[below + 1] - ascending[below]) * float(place - below)


def share_quantile(values, share):
    """The (1 - share)-quantile."""
    return quantile(values, 1 - exact(share))


def largest(values, k):
    """The k-th largest."""
    return sorted(values, reverse=True)[k - 1]


def exact(setting):
    return Fraction(repr(setting))
