"""Responses for tests of advantage estimators, and their advantages however the groups are cut into parts."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator

#: Tokens of a response at most, blocks, and the least and the greatest reward.
WIDTH, BLOCKS = 6, 3


def batch(
    rewards: Sequence[float],
    groups: Sequence[int] | None = None,
    lengths: Sequence[float] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ResponseBatch:
    """Responses with these rewards, all of one group unless told, each of 4 tokens unless told."""
    count = len(rewards)
    zeros, ids = torch.zeros(count, dtype=torch.float64), torch.tensor([0] * count if groups is None else groups).long()
    return ResponseBatch(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        lengths=zeros + 4 if lengths is None else torch.tensor(lengths, dtype=torch.float64),
        ended=zeros == 0,
        prompt_ids=ids,
        group_ids=ids,
        sequence_ids=torch.arange(count),
        given=zeros.long(),
        pivot=zeros,
        limit=64,
        extra={name: _tensor(one) for name, one in (extra or {}).items()},
    )


def _tensor(values: Any) -> Tensor:
    """In float64, or in integers where they are."""
    found = torch.as_tensor(values)
    return torch.as_tensor(values, dtype=torch.float64) if found.is_floating_point() else found


def drawn(seed: int, *, graded: bool = False) -> ResponseBatch:
    """Groups of 1 to 5 responses in any order, some of equal rewards, with all evidence that an estimator reads."""
    dice = random.Random(seed)
    sizes = [dice.randint(1, 5) for _ in range(6)]
    groups = [7 * place + 3 for place, size in enumerate(sizes) for _ in range(size)]
    dice.shuffle(groups)
    easy = dice.choice(groups)
    rewards = [1.0 if one == easy else dice.choice([0.0, 0.25, 0.5, 1.0] if graded else [0.0, 1.0]) for one in groups]
    lengths = [dice.randint(1, WIDTH) for _ in groups]

    def rows(draw: Any) -> list[list[float]]:
        return [[draw() if place < length else 0.0 for place in range(WIDTH)] for length in lengths]

    blocks = [dice.randint(0, BLOCKS) for _ in groups]
    logprobs = rows(lambda: -dice.random())
    return batch(
        rewards,
        groups,
        [float(one) for one in lengths],
        {
            "logprobs": logprobs,
            "rollout_logprobs": rows(lambda: -dice.random()),
            # the rest of the probability is one other token's, or many others'
            "sum_p_sq": [
                [math.exp(2 * one) + dice.random() * (1 - math.exp(one)) ** 2 if one else 0.0 for one in row]
                for row in logprobs
            ],
            "squared_gradient": [dice.uniform(0.1, 3.0) for _ in groups],
            "block_rewards": [[dice.choice([0.0, 0.5, 1.0]) for _ in range(BLOCKS)] for _ in groups],
            "block_outcomes": [
                [dice.randint(1, 2) if place < count else 0 for place in range(BLOCKS)] for count in blocks
            ],
            "block_ids": [[dice.randint(-1, count - 1) for _ in range(WIDTH)] for count in blocks],
            "reward_parts": [[dice.choice([0.0, 0.5, 1.0]) for _ in range(BLOCKS)] for _ in groups],
            "reward_weights": [[1.0, 0.25, -0.5] for _ in groups],
        },
    )


def advantages(estimator: AdvantageEstimator, *parts: ResponseBatch) -> list[Tensor]:
    """Of each part, with statistics over all of them."""
    stat, state = measure_all(estimator, list(parts), estimator.init_state(), LocalComm())
    return [estimator.advantages(one, stat, state) for one in parts]


def by_group(given: ResponseBatch) -> list[list[int]]:
    """Places of the responses of each group."""
    groups: dict[int, list[int]] = {}
    for place, one in enumerate(given.group_ids.tolist()):
        groups.setdefault(one, []).append(place)
    return list(groups.values())
