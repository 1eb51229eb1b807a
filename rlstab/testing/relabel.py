"""Other ids for the same responses, with random numbers drawn as if the ids were unchanged."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rlstab.core import random

#: Maps from numbers 0, 1, ... to ids: small ones in reverse order, but not those that a stage draws beside ids;
#: consecutive ones that float32 does not distinguish; and ones that collide as int32.
_IDS: dict[str, Callable[[Tensor], Tensor]] = {
    "small ids": lambda number: 100 + number.numel() - number,
    "ids above 2^24": lambda number: 2**24 + 1 + number,
    "ids above 2^31": lambda number: 2**33 + 5 * (number // 2) + 2**32 * (number % 2),
}


def relabellings(item: Any) -> Iterator[tuple[str, Any]]:
    """An optimizer step or a rollout under other ids of sequences and groups, each with a description of the ids."""
    sequences, groups = (ids.unique(return_inverse=True)[1] for ids in item.ids)
    for description, make in _IDS.items():
        relabelled = make(torch.cat([sequences, groups + len(sequences)]))
        yield description, item.relabelled(*relabelled.tensor_split([len(sequences)]))


@contextmanager
def same_draws(item: Any, original_item: Any) -> Iterator[None]:
    """A context in which random numbers by identity are those of the original, whatever calls for them.

    Args:
        item: an optimizer step or a rollout under other ids, see :func:`relabellings`.
        original_item: the one under the ids whose numbers are drawn.
    """
    distinct, index = torch.cat(item.ids).unique(return_inverse=True)
    first = torch.empty_like(distinct).index_copy(0, index, torch.cat(original_item.ids))

    def original(part: Tensor) -> Tensor:
        if part.dtype != torch.int64 or not distinct.numel():
            return part.to(torch.int64)
        index_of_part = torch.searchsorted(distinct, part).clamp(max=distinct.numel() - 1)
        return torch.where(distinct[index_of_part] == part, first[index_of_part], part)

    with mock.patch.object(random, "_integers", original):
        yield
