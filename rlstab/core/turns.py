"""The turns of a conversation: one rule, which needs nothing but the mask, for every trainer that masks replies."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlstab.errors import ShapeError


def starts_of(response_mask: Tensor) -> Tensor:
    """``(B, T)`` bool, the first token of each turn; see :func:`turns_of`."""
    mask = response_mask.bool()
    return mask & ~pad(mask, (1, 0))[:, :-1]


def turns_of(response_mask: Tensor) -> Tensor:
    """``(B, T)`` int64 turn of each token, from 0: a new turn begins after each masked block inside a response.

    Values where the mask is False mean nothing.

    Args:
        response_mask: ``(B, T)``, 1 or True on tokens that the policy wrote; those of an environment or a tool are 0.
    """
    return (starts_of(response_mask).cumsum(-1) - 1).clamp(min=0)


def turn_rewards_of(rewards: Sequence[Sequence[float] | None], response_mask: Tensor) -> Tensor:
    """``(B, T)`` float32 reward of the turn of each token.

    Args:
        rewards: one number for each turn of each response. The last turn, which calls no tool, may be without one: it
            earns 0. None is no numbers. Those of a response without a token in the mask are not read.
        response_mask: ``(B, T)``, see :func:`turns_of`.

    Raises:
        ShapeError: a response has another number of rewards than turns.
    """
    padded = torch.zeros(response_mask.shape)
    for row, count in enumerate(starts_of(response_mask).sum(-1).tolist()):
        earned = [float(reward) for reward in rewards[row] or ()] if count else []
        if count - len(earned) not in (0, 1):
            raise ShapeError(
                f"a response has {count} turns and {len(earned)} rewards of turns. Give one for each turn, or for each "
                f"but the last."
            )
        padded[row, : len(earned)] = torch.tensor(earned)
    return padded.to(response_mask.device).gather(1, turns_of(response_mask))


def context_of(response_mask: Tensor) -> Tensor:
    """``(B, T)`` bool, the tokens up to the last one that the policy wrote, which later tokens read.

    Args:
        response_mask: ``(B, T)`` bool.
    """
    return response_mask.flip(-1).cumsum(-1).flip(-1) > 0
