"""Comparisons of ``(n,)`` values with a number of float64, and large tensors in pieces."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def indices(where: Tensor) -> Tensor:
    """Indices of the ``(n,)`` bools on the CPU that are True, ascending; numpy finds them faster than torch."""
    return torch.from_numpy(where.numpy().nonzero()[0])


def reached(values: Tensor, number: float) -> Tensor:
    """``values >= number``, compared in float64: ``number`` may lie between two values of the dtype."""
    values, exact = _exact(values, number)
    return values >= exact


def below(values: Tensor, number: float) -> Tensor:
    """``values < number``, compared in float64 whatever the dtype."""
    values, exact = _exact(values, number)
    return values < exact


def _exact(values: Tensor, number: float) -> tuple[Tensor, float]:
    """The values as floats, and the smallest number of their dtype that is at least ``number``."""
    values = values if values.is_floating_point() else values.double()
    rounded = torch.tensor(number, dtype=values.dtype)
    if float(rounded) < number:
        rounded = rounded.nextafter(torch.tensor(math.inf, dtype=values.dtype))
    return values, float(rounded)


#: Elements of one piece, 512 KB in 8 bytes: on a CPU its intermediates stay in cache and in memory that is reused.
CHUNK = 1 << 16


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of ``(n,)`` tensors, piece by piece; on other devices a single piece, for fewer kernel launches."""
    if tensors[0].device.type != "cpu" or tensors[0].numel() <= CHUNK:
        return iter([tensors])
    return zip(*(torch.split(values, CHUNK) for values in tensors), strict=True)
