"""The leave-one-out advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlstab.core.method import State
from rlstab.core.stats import Settled
from rlstab.stages.advantages import rloo
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


@dataclass(frozen=True)
class RLOO(AdvantageEstimator):
    """The deviation from the mean of the other answers to the prompt."""

    name: ClassVar[str] = "rloo"

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return rloo(responses.rewards, responses.group_ids)
