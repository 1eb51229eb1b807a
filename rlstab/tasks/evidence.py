"""What a task says about a response besides its score, as evidence: its blocks, and its turns.

Which runs can read it, and what happens where the task fails: its code is the user's, and a failure costs the response
and ends no run.
"""

import math
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from os.path import commonprefix
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlstab.config.runs import RunConfig
from rlstab.core.compose import walk
from rlstab.core.padding import rows_of
from rlstab.core.turns import context_of, starts_of, turns_of
from rlstab.errors import ConfigError, DataError, MissingSignal
from rlstab.tasks import Block, Example
from rlstab.tasks.task import flaky_share

T = TypeVar("T")

#: Evidence given by a task that knows blocks.
BLOCKS = frozenset({"block_ids", "block_rewards", "block_outcomes"})

#: Evidence given by a task of several turns.
TURNS = frozenset({"turn", "turn_reward", "turn_rewards", "turn_states"})


def offers(task: Any, name: str) -> bool:
    """Whether a task has a method that not every task has, such as those of :class:`rlstab.tasks.HasTurns`."""
    return callable(getattr(task, name, None))


def require_evidence(run: RunConfig, task: Any, signals: Collection[str] = ()) -> None:
    """Check that a task provides the blocks and turns that a run reads, and nothing that they do not allow.

    Args:
        run: the configuration.
        task: the task that is used.
        signals: names of the signals that user-defined functions make.

    Raises:
        MissingSignal: the task has no blocks, no turns, or no rewards of turns.
        ConfigError: blocks are read of responses with several turns; or the task is flaky, which affects neither
            rewards of blocks nor those of turns.
    """
    methods = (leaf.method for leaf in walk(run.composition, observed=True))
    for name, needs in [
        *((method.name, method.needs - {*signals}) for method in methods),
        *((stage.name, stage.needs) for stage in run.pipeline),
    ]:
        blocks, turns = needs & BLOCKS, needs & TURNS
        for read, description, function, protocol in (
            (blocks, "no blocks", "blocks", "HasBlocks"),
            (turns, "one turn", "reply", "HasTurns"),
            (turns & {"turn_reward"}, "no rewards of turns", "turn_rewards", "HasTurns"),
        ):
            if read and not offers(task, function):
                raise MissingSignal(
                    f"'{name}' reads '{min(read)}', and responses of '{task.name}' have {description}. "
                    f"Give the task `{function}`, see rlstab.tasks.{protocol}."
                )
        if blocks and offers(task, "reply"):
            raise ConfigError(f"blocks are read, and responses of '{task.name}' have several turns. Read turns.")
        if turns | blocks - {"block_ids"} and flaky_share(task):
            raise ConfigError(
                f"'{name}' reads blocks or turns, whose rewards '{task.name}' does not lose. Set task.flaky to 0."
            )


def attempt(
    ask: Callable[[Any, Example, str], T],
    task: Any,
    example: Example,
    text: str,
    failed: Callable[[str], None],
    default: T,
) -> T:
    """``ask(task, example, text)``; if it fails, ``default``, and ``failed`` is called with the error."""
    try:
        return ask(task, example, text)
    except Exception as error:
        failed(f"{type(error).__name__}: {error} (completion {text[:80]!r})")
        return default


# -- blocks ------------------------------------------------------------------------------------------------------------


def block_evidence(
    task: Any,
    examples: Sequence[Example],
    texts: Sequence[str],
    answers: Sequence[Sequence[int]],
    prefixes: Sequence[int],
    width: int,
    decode: Callable[[list[int]], str],
    failed: Callable[[str], None],
) -> dict[str, Tensor]:
    """Blocks of ``S`` responses as what :class:`rlstab.stages.blockwise.Blockwise` and ``block_mean`` read.

    - ``block_ids``: ``(S, T)`` int64, the block of each sampled token, from 0, and -1 for none.
    - ``block_rewards``: ``(S, K)`` float64, 0 where there is no block; K is the most that a response has.
    - ``block_outcomes``: ``(S, K)`` int64, one more than that of the task, so that 0 means none.

    Args:
        task: gives the blocks.
        examples: the example of each response.
        texts: the whole answers, as the task sees them.
        answers: the tokens of each response, including those that were not sampled.
        prefixes: number of these that were not sampled; they come first, and ``block_ids`` leaves them out.
        width: T.
        decode: the function from tokens to text by which ``texts`` were made.
        failed: takes an error of the task; that response has no blocks.
    """
    blocks: list[list[Block]] = [
        attempt(checked_blocks, task, example, text, failed, []) for example, text in zip(examples, texts, strict=True)
    ]
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


# -- turns -------------------------------------------------------------------------------------------------------------


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
        examples: the example of each response.
        texts: the text of each response, as the task sees it.
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
