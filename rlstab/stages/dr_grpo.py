"""The group-relative advantage of Dr. GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlstab.core.method import State
from rlstab.core.stats import Settled
from rlstab.stages.advantages import dr_grpo
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


@dataclass(frozen=True)
class DrGRPO(AdvantageEstimator):
    """The deviation from the mean of the group, undivided."""

    name: ClassVar[str] = "dr_grpo"

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return dr_grpo(responses.rewards, responses.group_ids)
