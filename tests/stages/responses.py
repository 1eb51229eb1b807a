"""Responses for tests of stages, what a stage measures on them, and their advantages."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstab.core.comm import LocalComm
from rlstab.core.method import State, measure_all
from rlstab.core.stats import Mean, Settled
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator, Stage

#: Tokens of a response at most, and blocks.
WIDTH, BLOCKS = 6, 3


def batch(
    rewards: Sequence[float],
    groups: Any = 0,
    lengths: Any = 4.0,
    extra: Mapping[str, Any] | None = None,
    *,
    prompts: Any = None,
    ids: Any = None,
    given: Any = 0,
    pivot: Any = 0.0,
    ended: Any = True,
    limit: int = 64,
) -> ResponseBatch:
    """Responses with these rewards; every other field is a list, or one value for all."""
    return ResponseBatch.of(
        rewards,
        groups,
        limit=limit,
        extra={name: torch.as_tensor(np.asarray(values)) for name, values in (extra or {}).items()},
        lengths=lengths,
        ended=ended,
        given=given,
        pivot=pivot,
        prompt_ids=groups if prompts is None else prompts,
        sequence_ids=range(len(rewards)) if ids is None else ids,
    )


def drawn(seed: int, *, graded: bool = False) -> ResponseBatch:
    """Groups of 1 to 5 responses in any order, some of equal rewards, with all evidence that an estimator reads."""
    dice = random.Random(seed)
    sizes = [dice.randint(1, 5) for _ in range(6)]
    groups = [7 * place + 3 for place, size in enumerate(sizes) for _ in range(size)]
    dice.shuffle(groups)
    easy = dice.choice(groups)
    levels = [0.0, 0.25, 0.5, 1.0] if graded else [0.0, 1.0]
    rewards = [1.0 if group == easy else dice.choice(levels) for group in groups]
    lengths = [dice.randint(1, WIDTH) for _ in groups]

    def rows(draw: Any) -> list[list[float]]:
        return [[draw() if place < length else 0.0 for place in range(WIDTH)] for length in lengths]

    def concentrated(logprob: float) -> float:
        """The rest of the probability is one other token's, or many others'."""
        return math.exp(2 * logprob) + dice.random() * (1 - math.exp(logprob)) ** 2 if logprob else 0.0

    blocks = [dice.randint(0, BLOCKS) for _ in groups]
    turns = [1 + (length - 1) // 2 for length in lengths]
    logprobs = rows(lambda: -dice.random())
    extra = {
        "logprobs": logprobs,
        "rollout_logprobs": rows(lambda: -dice.random()),
        "sum_p_sq": [[concentrated(logprob) for logprob in row] for row in logprobs],
        "squared_gradient": [dice.uniform(0.1, 3.0) for _ in groups],
        "block_rewards": [[dice.choice([0.0, 0.5, 1.0]) for _ in range(BLOCKS)] for _ in groups],
        "block_outcomes": [[dice.randint(1, 2) if place < count else 0 for place in range(BLOCKS)] for count in blocks],
        "block_ids": [[dice.randint(-1, count - 1) for _ in range(WIDTH)] for count in blocks],
        "turn_rewards": [
            [dice.choice([0.0, 0.5, 1.0]) if n < count else 0.0 for n in range(BLOCKS)] for count in turns
        ],
        "turn_states": [[dice.randint(1, 2) if number < count else 0 for number in range(BLOCKS)] for count in turns],
        "turn": [[min(place // 2, count - 1) for place in range(WIDTH)] for count in turns],
        "reward_parts": [[dice.choice([0.0, 0.5, 1.0]) for _ in range(BLOCKS)] for _ in groups],
        "reward_weights": [[1.0, 0.25, -0.5] for _ in groups],
    }
    return batch(rewards, groups, lengths, extra)


def settled(stage: Stage, *parts: ResponseBatch, state: State | None = None) -> tuple[Settled, State]:
    """What a stage measures on all parts, and its state after them."""
    return measure_all(stage, parts, stage.init_state() if state is None else state, LocalComm())


def values_of(report: Mapping[str, Mean]) -> dict[str, float]:
    return {name: mean.value for name, mean in report.items()}


def advantages(estimator: AdvantageEstimator, *parts: ResponseBatch) -> list[Tensor]:
    """Of each part, with statistics over all of them."""
    stat, state = settled(estimator, *parts)
    return [estimator.advantages(part, stat, state) for part in parts]


def by_group(responses: ResponseBatch) -> list[list[int]]:
    """Indices of the responses of each group."""
    groups: dict[int, list[int]] = {}
    for place, group in enumerate(responses.group_ids.tolist()):
        groups.setdefault(group, []).append(place)
    return list(groups.values())
