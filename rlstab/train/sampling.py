"""Sampling: responses to examples in batches, as rollouts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from rlstab.core.padding import padded
from rlstab.models.decoding import Decoder
from rlstab.models.policy import FILLS
from rlstab.stages.response_batch import ResponseBatch
from rlstab.tasks import Example
from rlstab.train.rollout import Rollout

#: The reply of an environment to an answer, both as tokens; None ends the response.
Reply: TypeAlias = Callable[[Example, list[int]], Sequence[int] | None]

#: From the seed of a turn to that of the next one.
NEXT_TURN = 2**40


@torch.no_grad()
def sample(
    decoder: Decoder,
    examples: Sequence[Example],
    planned: ResponseBatch,
    *,
    begun: Sequence[Sequence[int]] | None = None,
    reply: Reply | None = None,
) -> Iterator[Rollout]:
    """Sample one response to each example, batch by batch.

    Each token is drawn by inverting the distribution function at a random number that depends only on ``(seed, sequence
    id, position)``, so a response does not depend on its batch or rank. A prompt that occurs several times in a batch
    is forwarded once.

    Args:
        decoder: the policy, and how it is sampled.
        examples: one per response; repeat an example for a group.
        planned: the responses, with their ids.
        begun: for each response the tokens that its answer begins with, as many as ``planned.given`` says; they become
            part of its prompt. They count towards ``rollout.max_new_tokens``.
        reply: answers each response that ended, which then goes on for another turn; None for a task of one turn.

    Yields:
        each batch, with sequences, signals at the sampling temperature, lengths, and which responses ended; without
        texts and scores.

    Raises:
        DataError: a prompt does not fit the model.
    """
    settings, begun = decoder.settings, [tuple(tokens) for tokens in begun or [()] * len(examples)]
    keys = [(example.messages or example.prompt, tokens) for example, tokens in zip(examples, begun, strict=True)]
    different = dict(zip(keys, examples, strict=True))  # prompts
    number = {key: index for index, key in enumerate(different)}
    ids, mask = decoder.policy.encode([*different.values()], settings, [tokens for _, tokens in different])
    prompt = torch.tensor([number[key] for key in keys], dtype=torch.int64)
    room = settings.max_new_tokens - planned.given
    for start in range(0, max(1, len(examples)), settings.batch_size):  # a rank may have no example
        span = slice(start, start + settings.batch_size)
        part = planned.select(span)
        out = decoder.batch(ids, mask, prompt[span], part.sequence_ids, room[span], begun[span])
        responses = replace(part, lengths=out.sequences.response_mask.sum(-1).double(), ended=out.ended)
        rollout, turn = Rollout(out.sequences, out.signals, examples[span], responses), 0
        rows = torch.arange(len(part))
        while reply is not None and len(rows):
            turn += 1
            later = replace(decoder, seed=decoder.seed + turn * NEXT_TURN)
            rollout, rows = _another_turn(rollout, rows, later, reply)
        yield rollout


def _another_turn(rollout: Rollout, rows: Tensor, decoder: Decoder, reply: Reply) -> tuple[Rollout, Tensor]:
    """The rollout with the environment's replies to some rows, and what the policy answers to each.

    Replies count towards the limit of the length; one that leaves no room for an answer cuts the response off.

    Returns:
        the rollout, and the rows that another turn was sampled for.
    """
    answers, limit, begun = rollout.answers(), decoder.settings.max_new_tokens, dict[int, list[int]]()
    ended = rollout.responses.ended.clone()
    for row in rows[ended[rows]].tolist():
        tokens = reply(rollout.examples[row], answers[row])
        if tokens is not None:
            ended[row] = False
            if len(answers[row]) + len(tokens) < limit:
                begun[row] = [*answers[row], *tokens]
    rows = torch.tensor([*begun], dtype=torch.int64)
    if begun:
        rollout, ended[rows] = _with_turn(rollout, begun, decoder)
    lengths = rollout.response_mask.sum(-1).double()
    return replace(rollout, responses=replace(rollout.responses, lengths=lengths, ended=ended)), rows


def _with_turn(rollout: Rollout, begun: Mapping[int, Sequence[int]], decoder: Decoder) -> tuple[Rollout, Tensor]:
    """Sample on after the tokens that some answers begin with, by row; and ``(n,)`` bool, whether each ended."""
    policy, rows, begins = decoder.policy, torch.tensor([*begun]), [*begun.values()]
    ids, mask = policy.encode([rollout.examples[row] for row in begun], decoder.settings, begins)
    lengths = torch.tensor([len(tokens) for tokens in begins])
    room, ids_of_rows = decoder.settings.max_new_tokens - lengths, rollout.sequence_ids[rows]
    # a stop text of the turn before does not end this one
    out = decoder.batch(ids, mask, torch.arange(len(rows)), ids_of_rows, room, [()] * len(rows))
    columns = lengths.unsqueeze(1) + torch.arange(out.sequences.response_ids.shape[1])
    length = max(rollout.response_ids.shape[1], int(columns.max()) + 1)

    def with_answers(values: Tensor, answers: Tensor, fill: float = 0) -> Tensor:
        """``(R, length, ...)`` values with those of the answers after the tokens that these begin with."""
        shape = [max(sizes) for sizes in zip(values.shape[2:], answers.shape[2:], strict=True)]
        wider = padded(values, (length, *shape), fill)
        wider[rows.unsqueeze(1), columns] = padded(answers, (columns.shape[1], *shape), fill)
        return wider

    fills = FILLS | {"response_ids": policy.pad_id}
    responses = {
        name: with_answers(values, out.sequences.responses[name], fills.get(name, 0))
        for name, values in rollout.sequences.responses.items()
    }
    for row, tokens in begun.items():
        responses["response_ids"][row, : len(tokens)] = torch.tensor(tokens)
    signals = {name: with_answers(values, out.signals[name]) for name, values in rollout.signals.items()}
    return replace(rollout, sequences=replace(rollout.sequences, **responses), signals=signals), out.ended
