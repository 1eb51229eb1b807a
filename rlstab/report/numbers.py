"""Numbers for readers: the decimals of their neighbours, a real minus sign, intervals in brackets."""

from __future__ import annotations

import math
from collections.abc import Iterable

#: Stands where there is no number, and before one below zero.
NOTHING, MINUS = "\u2013", "\u2212"


def setting(value: float) -> str:
    """A value that somebody chose, as they may have written it: ``1.5e-4``, ``0.02``, ``16``."""
    if value != 0 and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


def decimals(value: float | None, places: int, signed: bool = False) -> str:
    """A number of a column: as many decimals as its neighbours."""
    if value is None or not math.isfinite(value):
        return NOTHING
    text = f"{abs(value):.{places}f}"
    zero = float(text) == 0
    return ("" if zero else MINUS if value < 0 else "+" if signed else "") + text


def places(values: list[float]) -> int:
    """Decimals for a column: three, fewer for large numbers, more where all are small; at most six."""
    largest = max((abs(one) for one in values if math.isfinite(one)), default=0.0)
    if largest >= 10:
        return 1
    return 3 if largest == 0 or largest >= 0.01 else min(6, 1 - math.floor(math.log10(largest)))


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in short: ``0-4, 7``."""
    found: list[list[int]] = []
    for one in sorted(set(numbers)):
        if found and one == found[-1][1] + 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in found)


def counted(count: int, what: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count} {what}{'s' * (count != 1)}"


def estimate(value: float | None, low: float | None, high: float | None) -> str:
    """A number with its interval, if it has one."""
    digits = places([one for one in (value, low, high) if one is not None])
    inside = "" if low is None or high is None else f" [{decimals(low, digits)}, {decimals(high, digits)}]"
    return decimals(value, digits) + inside


def listed(names: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *most, last = list(names)
    return f"{', '.join(most)} and {last}" if most else last
