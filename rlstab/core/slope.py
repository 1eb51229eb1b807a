"""Values whose slope is known when they are made: one product backward, however they were computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def with_slope(x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """``value`` as a function of ``x``, both ``(n,)`` and elementwise, with the derivative ``slope``.

    ``value`` and ``slope`` are computed from ``x.detach()``. A second derivative raises.
    """
    made: Tensor = _Sloped.apply(x, value, slope)  # type: ignore[no-untyped-call]
    return made


class _Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return gradient * slope, None, None
