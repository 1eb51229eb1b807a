"""Comparisons of ``(n,)`` values, as bools; and large tensors in pieces.

On a CPU numpy makes bools several times faster than torch, which writes them one by one; other devices use plain torch,
in one kernel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def greater(values: Tensor, other: float | Tensor) -> Tensor:
    """``values > other``; a number is rounded to the dtype of the values."""
    return _compare(operator.gt, values, other)


def less(values: Tensor, other: float | Tensor) -> Tensor:
    """``values < other``; a number is rounded to the dtype of the values."""
    return _compare(operator.lt, values, other)


def numbers(where: Tensor) -> Tensor:
    """Bools as 0 and 1 for arithmetic: bytes, which torch converts faster."""
    return where.view(torch.uint8)


def indices(where: Tensor) -> Tensor:
    """Indices of the ``(n,)`` bools on the CPU that are True, ascending; numpy finds them faster than torch."""
    return torch.from_numpy(where.numpy().nonzero()[0])


def narrowed(where: Tensor, test: Callable[[Any], Tensor]) -> Tensor:
    """``(n,)`` bool, True where ``where`` is and a test of these tokens holds as well.

    Args:
        where: ``(n,)`` bool.
        test: from an index of tokens to their bools. A CPU tests few tokens faster than all; to learn which they are
            waits for another device, so there the index is all of them.
    """
    if where.device.type != "cpu":
        return where & test(slice(None))
    few = indices(where)
    return where.index_copy(0, few, test(few))


def reached(values: Tensor, number: float) -> Tensor:
    """``values >= number`` as float64 has it, whatever the dtype: ``number`` may lie between two values of it."""
    return _compare(operator.ge, *_exact(values, number))


def below(values: Tensor, number: float) -> Tensor:
    """``values < number`` as float64 has it, whatever the dtype."""
    return _compare(operator.lt, *_exact(values, number))


def _compare(compare: Callable[[Any, Any], Any], values: Tensor, other: float | Tensor) -> Tensor:
    if values.device.type != "cpu" or values.dtype not in (torch.float32, torch.float64):
        where: Tensor = compare(values, other)
        return where
    other = other.detach() if isinstance(other, Tensor) else torch.tensor(other, dtype=values.dtype)
    return torch.from_numpy(compare(values.detach().numpy(), other.numpy()))


def _exact(values: Tensor, number: float) -> tuple[Tensor, float]:
    """The values as floats, and the smallest number of their dtype that is not below ``number``: none lies between."""
    values = values if values.is_floating_point() else values.double()
    rounded = torch.tensor(number, dtype=values.dtype)
    if float(rounded) < number:
        rounded = rounded.nextafter(torch.tensor(math.inf, dtype=values.dtype))
    return values, float(rounded)


#: Elements of one piece, 512 KB in 8 bytes: on a CPU its intermediates stay in cache and in memory that is reused.
CHUNK = 1 << 16


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of ``(n,)`` tensors, piece by piece; on other devices a single piece, for fewer kernel launches."""
    size = CHUNK if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    return zip(*(torch.split(values, size) for values in tensors), strict=True)
