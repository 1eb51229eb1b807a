"""Rows of different lengths in one tensor."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad


def padded(values: Tensor, shape: Sequence[int], fill: float = 0, *, left: bool = False) -> Tensor:
    """A copy of ``(R, ...)`` values in the larger ``(R, *shape)``, padded on the right, or on the left."""
    short = [full - size for full, size in zip(reversed(shape), reversed(values.shape[1:]), strict=True)]
    return pad(values, [*chain(*((n, 0) if left else (0, n) for n in short))], value=fill)


def joined_rows(parts: Sequence[Tensor], fill: float = 0, *, left: bool = False) -> Tensor:
    """The rows of all ``(R, ...)`` parts, padded to the largest of them."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    return torch.cat([padded(part, shape, fill, left=left) for part in parts])


def rows_of(
    lists: Sequence[Sequence[float]], dtype: torch.dtype, fill: float = 0, *, width: int = 0, left: bool = False
) -> Tensor:
    """Lists as rows, padded on the right, or on the left, to ``width`` or to the longest of them."""
    rows = [torch.tensor([values], dtype=dtype) for values in lists]
    return joined_rows([torch.zeros((0, width), dtype=dtype), *rows], fill, left=left)
