"""In which order the rows of an optimizer step are cut into parts."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstab.train.padded_rows import Sequences
from rlstab.train.shared_prompts import worthwhile


def in_parts(sequences: Sequences, advantages: Tensor, group_ids: Tensor, rows: Tensor, size: int) -> Tensor:
    """``rows`` in the order that forwards the fewest tokens, if parts of ``size`` are cut off it.

    Rows without an advantage come last, as they often need no forward. Within each kind, long rows stand with long
    ones, which saves padding, or groups stand together, which share a prompt. Which is better depends on the lengths.

    Args:
        sequences: all ``R`` of the rollout.
        advantages: ``(R,)`` or ``(R, T)``, on the CPU.
        group_ids: ``(R,)`` int64, on the CPU.
        rows: ``(n,)`` int64, those of this optimizer step.
        size: rows in a part.
    """
    prompt, response = torch.stack([sequences.prompt_mask.sum(-1), sequences.response_mask.sum(-1)]).cpu()[:, rows]
    none = advantages[rows] == 0
    if none.ndim == 2:
        none = (none | ~sequences.response_mask.cpu()[rows]).all(-1)
    group = group_ids[rows].unique(return_inverse=True)[1]
    length = prompt + response
    longest = length.new_zeros(len(rows)).scatter_reduce(0, group, length, "amax")[group]
    by_length = _sorted(-length, none.long())
    if len(rows) <= size:  # one part, whatever the order
        return rows[by_length]
    by_group = _sorted(-length, group, -longest, none.long())
    orders = sorted(
        (by_length, by_group), key=lambda order: _tokens(prompt[order], response[order], group[order], size)
    )
    return rows[orders[0]]


def _sorted(*keys: Tensor) -> Tensor:
    """The order by the last key, where that is equal by the one before it, and so on."""
    order = torch.arange(len(keys[0]))
    for key in keys:
        order = order[key[order].argsort(stable=True)]
    return order


def _tokens(prompt: Tensor, response: Tensor, group: Tensor, size: int) -> int:
    """Tokens of all parts with their padding, if groups share their prompts where it is worthwhile."""
    total = 0
    for p, r, g in zip(prompt.split(size), response.split(size), group.split(size), strict=True):
        width, length, prompts = int(p.max()), int(r.max()), len(g.unique())
        shared = prompts if worthwhile(len(p), prompts, width, length) else len(p)
        total += shared * width + len(p) * length
    return total
