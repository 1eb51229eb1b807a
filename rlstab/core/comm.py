"""What a plan needs of other ranks: a sum and a gather. One process needs neither."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Comm(Protocol):
    """The collectives of a plan. Every rank calls them in the same order, including a rank without tokens."""

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks of a float64 tensor whose shape is the same on every rank."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Concatenation over ranks, in rank order, of one-dimensional float64 tensors of any length."""
        ...


class LocalComm:
    """One process: both collectives are the identity."""

    def sum(self, values: Tensor) -> Tensor:
        """Return ``values``."""
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Return ``values``."""
        return values


class TorchComm:
    """``torch.distributed``: gloo on CPU, nccl on CUDA.

    Args:
        group: process group whose ranks share one optimizer step; None is the default group.
        device: where the backend wants its tensors (``cuda`` for nccl).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self.group = group
        self.device = torch.device(device)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks."""
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        """Ragged concatenation over ranks: lengths first, then rows padded to the longest."""
        world = dist.get_world_size(self.group)
        length = torch.tensor([values.numel()], dtype=torch.int64, device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(world)]
        dist.all_gather(lengths, length, group=self.group)
        sizes = [int(one) for one in lengths]
        padded = torch.zeros(max(sizes), dtype=values.dtype, device=self.device)
        padded[: values.numel()] = values
        rows = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(rows, padded, group=self.group)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)]).to(values.device)
