"""The turns of a conversation: one rule, which needs nothing but the mask, for every trainer that masks replies."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad


def turns_of(response_mask: Tensor) -> Tensor:
    """``(B, T)`` int64 turn of each token, from 0: a new turn begins after each masked block inside a response.

    Values where the mask is False mean nothing.

    Args:
        response_mask: ``(B, T)``, 1 or True on tokens that the policy wrote; those of an environment or a tool are 0.
    """
    mask = response_mask.bool()
    starts = mask & ~pad(mask, (1, 0))[:, :-1]
    return (starts.cumsum(-1) - 1).clamp(min=0)


def context_of(response_mask: Tensor) -> Tensor:
    """``(B, T)`` bool, the tokens up to the last one that the policy wrote, which later tokens read.

    Args:
        response_mask: ``(B, T)`` bool.
    """
    return response_mask.flip(-1).cumsum(-1).flip(-1) > 0
