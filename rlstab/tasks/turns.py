"""Tasks of several turns: the replies of the environment, the reward of each turn, and what each turn answers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlstab.core.padding import rows_of
from rlstab.core.turns import context_of, starts_of, turns_of
from rlstab.errors import DataError
from rlstab.tasks import Example
from rlstab.tasks.attempts import attempt, offers


def reply_tokens(task: Any, example: Example, text: str, encode: Callable[[str], list[int]]) -> list[int] | None:
    """The tokens of a reply to an answer; None if there is none.

    Raises:
        DataError: the reply has no tokens.
    """
    reply = task.reply(example, text)
    tokens = None if reply is None else encode(reply)
    if tokens is not None and not tokens:
        raise DataError("`reply` returned a text without a token. Return None to end the response.")
    return tokens


def turn_evidence(
    task: Any,
    examples: Sequence[Example],
    texts: Sequence[str],
    ids: Tensor,
    mask: Tensor,
    rewards: Tensor,
    failed: Callable[[str], None],
) -> dict[str, Tensor]:
    """What :class:`rlstab.stages.gigpo.GiGPO` and ``turn_credit`` read of ``S`` responses.

    - ``turn_rewards``: ``(S, K)`` float64, 0 where there is no turn; K is the most that a response has.
    - ``turn_states``: ``(S, K)`` int64, a checksum of the reply before each turn, from 1, and 0 where there is no turn.

    Args:
        task: gives the rewards of turns; without ``turn_rewards`` the last turn earns all.
        examples: of each response.
        texts: of each response, as the task sees it.
        ids: ``(S, T)`` int64 tokens of responses and replies.
        mask: ``(S, T)`` bool, the tokens that the policy wrote.
        rewards: ``(S,)`` of whole responses.
        failed: takes an error of the task; all turns of that response earn 0.
    """
    turns, replied = turns_of(mask), context_of(mask) & ~mask
    earned, states = list[list[float]](), list[list[int]]()
    for row, count in enumerate(starts_of(mask).sum(-1).tolist()):
        earned.append([0.0] * (count - 1) + [float(rewards[row])] * (count > 0))
        if offers(task, "turn_rewards"):
            ask = partial(_rewards, count=count)
            earned[-1] = attempt(ask, task, examples[row], texts[row], failed, [0.0] * count)
        # no reply comes before the first one
        replies = [ids[row][replied[row] & (turns[row] == turn - 1)] for turn in range(count)]
        states.append([1 + zlib.crc32(reply.numpy().tobytes()) for reply in replies])
    return {"turn_rewards": rows_of(earned, torch.float64), "turn_states": rows_of(states, torch.int64)}


def _rewards(task: Any, example: Example, text: str, count: int) -> list[float]:
    """The rewards of the ``count`` turns of a response."""
    values = [float(value) for value in task.turn_rewards(example, text)]
    if len(values) < count or not all(map(math.isfinite, values)):
        raise DataError(f"`turn_rewards` returned {values} for {count} turns. Return a finite number for each.")
    return values[:count]
