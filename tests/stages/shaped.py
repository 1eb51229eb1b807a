"""Responses for tests of reward shapers, as batches and as lists."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from rlstab.stages.response_batch import ResponseBatch


@dataclass(frozen=True)
class Answer:
    """One response, in plain Python."""

    reward: float
    sampled: int
    given: int
    ended: bool
    group: int


def answers(count: int, limit: int, seed: int, group: int = 4) -> list[Answer]:
    """Random responses in groups of up to ``group``, some of them branches, some cut off."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        given = rng.choice([0, 0, rng.randint(1, limit // 2)])
        sampled = rng.randint(1, limit - given)
        ended = sampled + given < limit or rng.random() < 0.3
        made.append(Answer(float(rng.random() < 0.5), sampled, given, ended, index // group))
    return made


def batch_of(found: list[Answer], limit: int) -> ResponseBatch:
    """The batch that holds them."""

    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    groups = torch.tensor([one.group for one in found], dtype=torch.int64)
    return ResponseBatch(
        rewards=floats([one.reward for one in found]),
        lengths=floats([float(one.sampled) for one in found]),
        ended=torch.tensor([one.ended for one in found], dtype=torch.bool),
        prompt_ids=groups * 3,
        group_ids=groups,
        sequence_ids=torch.arange(len(found), dtype=torch.int64),
        given=torch.tensor([one.given for one in found], dtype=torch.int64),
        pivot=floats([one.given / limit for one in found]),
        limit=limit,
    )
