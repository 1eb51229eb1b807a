"""The group-relative advantage of GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from rlstab.core.method import State
from rlstab.core.settings import Range
from rlstab.core.stats import Settled
from rlstab.stages.advantages import grpo
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


@dataclass(frozen=True)
class GRPO(AdvantageEstimator):
    """The deviation from the mean of the group, in standard deviations of the group."""

    name: ClassVar[str] = "grpo"

    std: bool = True
    epsilon: Annotated[float, Range(gt=0)] = 1e-4
    ddof: Literal[0, 1] = 1

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return grpo(responses.rewards, responses.group_ids, std=self.std, epsilon=self.epsilon, ddof=self.ddof)
