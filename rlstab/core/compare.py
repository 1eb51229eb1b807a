"""Comparisons of ``(n,)`` values, as bools.

On a CPU torch writes bools one by one, so that comparing into floats and converting is faster; elsewhere it is plain
torch, in one kernel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def greater(values: Tensor, other: float | Tensor) -> Tensor:
    """``values > other``; a number is rounded to the dtype of the values."""
    if values.device.type != "cpu":
        return values > other
    return torch.gt(values, other, out=torch.empty_like(values)).bool()


def less(values: Tensor, other: float | Tensor) -> Tensor:
    """``values < other``; a number is rounded to the dtype of the values."""
    if values.device.type != "cpu":
        return values < other
    return torch.lt(values, other, out=torch.empty_like(values)).bool()


def nonzero(values: Tensor) -> Tensor:
    """``values != 0``."""
    return values.bool()


def numbers(where: Tensor) -> Tensor:
    """Bools as 0 and 1 for arithmetic: bytes, which torch converts faster."""
    return where.view(torch.uint8)


def places(where: Tensor) -> Tensor:
    """Indices of the ``(n,)`` bools that are True, ascending; on a CPU numpy finds them faster."""
    if where.device.type == "cpu":
        return torch.from_numpy(where.numpy().nonzero()[0])
    return where.nonzero().squeeze(1)


def reached(values: Tensor, number: float) -> Tensor:
    """``values >= number`` as float64 has it, whatever the dtype: ``number`` may lie between two values of it."""
    if not values.is_floating_point():
        values = values.double()
    bound = _next(number, values.dtype)
    if values.device.type != "cpu":
        return values >= bound
    return torch.ge(values, bound, out=torch.empty_like(values)).bool()


def below(values: Tensor, number: float) -> Tensor:
    """``values < number`` as float64 has it, whatever the dtype."""
    if not values.is_floating_point():
        values = values.double()
    return less(values, _next(number, values.dtype))


def _next(number: float, dtype: torch.dtype) -> float:
    """The smallest number of the dtype that is not below ``number``: no value of the dtype lies between the two."""
    rounded = torch.tensor(number, dtype=dtype)
    if float(rounded) < number:
        rounded = rounded.nextafter(torch.tensor(math.inf, dtype=dtype))
    return float(rounded)
