"""Which token is in which block: from blocks of characters, as a task defines them, to tokens."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from rlstab.core.padding import rows_of
from rlstab.errors import DataError
from rlstab.tasks import Block, Example


def block_evidence(
    blocks: Sequence[Sequence[Block]],
    texts: Sequence[str],
    answers: Sequence[Sequence[int]],
    prefixes: Sequence[int],
    width: int,
    decode: Callable[[list[int]], str],
) -> dict[str, Tensor]:
    """Blocks of ``S`` responses as what :class:`rlstab.stages.blockwise.Blockwise` and ``block_mean`` read.

    - ``block_ids``: ``(S, T)`` int64, the block of each sampled token, from 0, and -1 for none.
    - ``block_rewards``: ``(S, K)`` float64, 0 where there is no block; K is the most that a response has.
    - ``block_outcomes``: ``(S, K)`` int64, one more than that of the task, so that 0 means none.

    Args:
        blocks: the blocks of each response, by :func:`checked_blocks`.
        texts: the whole answers, as the task saw them.
        answers: the tokens of each response, including those that were not sampled.
        prefixes: number of these that were not sampled; they come first, and ``block_ids`` leaves them out.
        width: T.
        decode: the function from tokens to text by which ``texts`` were made.
    """
    sampled = [
        token_blocks(tokens, text, row_blocks, decode)[prefix:]
        for tokens, text, row_blocks, prefix in zip(answers, texts, blocks, prefixes, strict=True)
    ]
    return {
        "block_ids": rows_of(sampled, torch.int64, -1, width=width),
        "block_rewards": rows_of([[block.reward for block in row_blocks] for row_blocks in blocks], torch.float64),
        "block_outcomes": rows_of([[block.outcome + 1 for block in row_blocks] for row_blocks in blocks], torch.int64),
    }


def token_blocks(
    tokens: Sequence[int], text: str, blocks: Sequence[Block], decode: Callable[[list[int]], str]
) -> list[int]:
    """The block of each token, -1 for none.

    A token belongs to the first block that has one of its characters: it was chosen while that block was written, and
    later blocks must not depend on it. A token that is part of a character belongs to the block of the character, and
    tokens without text at the end of an answer, such as EOS, to a block that reaches to the end. So a short block may
    have no token.

    Characters are found by decoding the first n tokens, since a single token may decode differently; only the edges of
    blocks are searched for, by bisection.
    """
    counts = range(len(tokens) + 1)

    @cache
    def reached(count: int) -> int:
        """The number of characters that the first tokens complete; a partial character decodes differently and does not
        count.
        """
        prefix = decode(list(tokens[:count]))
        return len(commonprefix([prefix, text]))  # noqa: RUF071  # of texts, not of paths

    numbers = [-1] * len(tokens)
    for number, block in enumerate(blocks):
        # a token that reaches beyond the start, or the first part of a character that begins there
        past, begun = (side(counts, block.start, key=reached) for side in (bisect_right, bisect_left))
        last = len(tokens) if block.stop == len(text) else bisect_left(counts, block.stop, key=reached)
        for index in range(min(past - 1, begun), min(last, len(tokens))):
            if numbers[index] < 0:
                numbers[index] = number
    return numbers


def checked_blocks(task: Any, example: Example, text: str) -> list[Block]:
    """The blocks of a text by the task, if they follow one another.

    Raises:
        DataError: they do not, or a reward or an outcome is not valid.
    """
    end, checked = 0, list(task.blocks(example, text))
    for block in checked:
        lies = isinstance(block, Block) and end <= block.start < block.stop <= len(text)
        if not lies or not math.isfinite(block.reward) or block.outcome != int(block.outcome) or block.outcome < 0:
            raise DataError(
                f"`blocks` returned {block!r} where the last one ends at {end}, in a text of {len(text)} characters. "
                f"Return Blocks in order, not empty, without overlap, with a finite reward and an outcome from 0 on."
            )
        end = block.stop
    return checked
