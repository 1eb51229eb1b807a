"""The vocabulary head itself: from hidden states to a tile of logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstab.signals.tile import Buffers


@dataclass(frozen=True, eq=False)
class Head:
    """From hidden states to logits: ``softcap * tanh(scale * (h W' + b) / softcap) / temperature``."""

    weight: Tensor
    bias: Tensor | None
    temperature: float | Tensor
    scale: float
    softcap: float | None

    def pick(self, index: Tensor) -> Head:
        """The same head for some of the rows."""
        by_row = self.temperature[index] if isinstance(self.temperature, Tensor) else self.temperature
        return Head(self.weight, self.bias, by_row, self.scale, self.softcap)

    def tiles(self, columns: int) -> Iterator[slice]:
        """Slices of the vocabulary."""
        size = self.weight.shape[0]
        return (slice(start, min(start + columns, size)) for start in range(0, size, columns))

    @property
    def factor(self) -> float | Tensor:
        """The derivative of a logit with respect to ``h W' + b``, less the bend of the soft cap."""
        return self.scale / self.temperature

    def logits(self, hidden: Tensor, rows: slice, columns: slice, buffers: Buffers) -> Tensor:
        """One wide tile, in a buffer; the bend of the soft cap, d capped / d not capped, is left in another."""
        by_row = isinstance(self.temperature, Tensor)
        inner = self.scale if self.softcap is None else self.scale / self.softcap
        outer = 1.0 if self.softcap is None else self.softcap
        if isinstance(self.temperature, float):
            outer /= self.temperature
        if self.softcap is None:  # nothing lies between: one factor, in the product's own epilogue
            inner, outer = inner * outer, 1.0
        weight = self.weight[columns]
        bias = None if self.bias is None else self.bias[columns]
        x = buffers.take("logits", hidden[rows].shape[0], weight.shape[0])
        if hidden.dtype == x.dtype:
            torch.addmm(
                x if bias is None else bias,
                hidden[rows],
                weight.t(),
                beta=0.0 if bias is None else inner,
                alpha=inner,
                out=x,
            )
        else:
            x.copy_(self._narrow(hidden[rows], weight, bias, buffers))
            if inner != 1.0:
                x.mul_(inner)
        if self.softcap is not None:
            x.tanh_()
            torch.square(x, out=buffers.take("bend", *x.shape)).neg_().add_(1.0)
            x.mul_(outer)
        if by_row:
            x.div_(self.temperature[rows].unsqueeze(1))  # type: ignore[index]
        return x

    @staticmethod
    def _narrow(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffers: Buffers) -> Tensor:
        if hidden.is_cuda:  # the product is summed in float32 anyway; there it need not be rounded
            product = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            return product if bias is None else product.add_(bias)
        x = buffers.take("narrow", hidden.shape[0], weight.shape[0], hidden.dtype)
        if bias is None:
            return torch.mm(hidden, weight.t(), out=x)
        return torch.addmm(bias, hidden, weight.t(), out=x)
