"""Sampling: responses to examples in batches, as rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from rlstab.config.settings import RolloutSettings
from rlstab.models.decoding import Decoder
from rlstab.models.policy import Policy
from rlstab.stages.response_batch import ResponseBatch
from rlstab.tasks import Example
from rlstab.train.rollout import Rollout


@torch.no_grad()
def sample(
    policy: Policy,
    examples: Sequence[Example],
    planned: ResponseBatch,
    settings: RolloutSettings,
    *,
    seed: int,
    begun: Sequence[Sequence[int]] | None = None,
    needs: Set[str] = frozenset(),
    options: Mapping[str, float] | None = None,
    greedy: bool = False,
) -> Iterator[Rollout]:
    """Sample one response to each example, batch by batch.

    Each token is drawn by inverting the distribution function at a random number that depends only on ``(seed, sequence
    id, position)``, so a response does not depend on its batch or rank. A prompt that occurs several times in a batch
    is forwarded once.

    Args:
        policy: the model to sample from.
        examples: one per response; repeat an example for a group.
        planned: the responses, with their ids.
        settings: length, temperature, batch size, stop texts.
        seed: the seed of the run or of the evaluation.
        begun: for each response the tokens that its answer begins with, as many as ``planned.given`` says; they become
            part of its prompt. They count towards ``settings.max_new_tokens``.
        needs: signals to return.
        options: numbers that define signals, such as ``min_p``.
        greedy: take the most probable token instead.

    Yields:
        each batch, with sequences, signals at the sampling temperature, lengths, and which responses ended; without
        texts and scores.

    Raises:
        DataError: a prompt does not fit the model.
    """
    begun = [tuple(tokens) for tokens in begun] if begun is not None else [()] * len(examples)
    keys = [(example.messages or example.prompt, tokens) for example, tokens in zip(examples, begun, strict=True)]
    first: dict[Any, int] = {}  # the first response with each prompt
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    number = {key: index for index, key in enumerate(first)}
    ids, mask = policy.encode(
        [examples[row] for row in first.values()], settings, [begun[row] for row in first.values()]
    )
    prompt = torch.tensor([number[key] for key in keys], dtype=torch.int64)
    room = settings.max_new_tokens - planned.given
    decoder = Decoder(policy, settings, seed, sorted(needs | {"logprobs"}), options or {}, greedy)
    for start in range(0, max(1, len(examples)), settings.batch_size):  # a rank may have no example
        span = slice(start, start + settings.batch_size)
        part = planned.select(span)
        out = decoder.batch(ids, mask, prompt[span], part.sequence_ids, room[span], begun[span])
        responses = replace(part, lengths=out.sequences.response_mask.sum(-1).double(), ended=out.ended)
        yield Rollout(out.sequences, out.signals, examples[span], responses)
