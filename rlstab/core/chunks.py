"""Large tensors in pieces: on a CPU the intermediates of a piece stay in cache and in memory that is reused."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Elements of one piece: 512 KB in 8 bytes.
CHUNK = 1 << 16


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of ``(n,)`` tensors, piece by piece; on other devices a single piece, for fewer kernel launches."""
    size = CHUNK if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    return zip(*(torch.split(one, size) for one in tensors), strict=True)
