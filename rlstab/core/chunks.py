"""Large tensors in pieces: on a CPU what is made of a piece stays in cache and in memory that is used again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Elements of one piece: 512 KB in 8 bytes.
CHUNK = 1 << 16


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of ``(n,)`` tensors, piece by piece; elsewhere than on a CPU a single piece, and fewer launches."""
    size = CHUNK if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    return zip(*(torch.split(one, size) for one in tensors), strict=True)
