"""A verifier that errs, by response and in training only: ``reward/mean`` and evaluations stay true."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab.core.method import State
from rlstab.core.method_settings import Range
from rlstab.core.random import uniform
from rlstab.core.stats import Settled
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import RewardShaper

#: Added to the seed: a sampler draws by (seed, response, position), and the numbers here must be others.
STREAM = 1 << 41


class FalseRewards(RewardShaper):
    """A right answer scores 0 with probability ``negative``, a wrong one 1 with probability ``positive``."""

    name = "false_rewards"
    negative: Annotated[float, Range(ge=0, le=1)] = 0.0
    positive: Annotated[float, Range(ge=0, le=1)] = 0.0
    seed: Annotated[int, Range(ge=0, lt=2**32)] = 0

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        """``(R,)`` float64: what makes a score false, added to it."""
        drawn, right = uniform(self.seed + STREAM, responses.sequence_ids), responses.rewards >= 0.5
        loses, gains = right & (drawn < self.negative), ~right & (drawn < self.positive)
        return torch.where(loses, -responses.rewards, torch.where(gains, 1 - responses.rewards, 0.0)).double()
