"""Published methods as gates, and a ratio. They exist for the tests; sources stand beside each.

CISPO ships as a surrogate. As a gate it acts beside a trust region, beside other gates and within a mask.
"""

from dataclasses import dataclass
from typing import final

import torch

from rlstab import Gate, Terms, TokenObjective
from rlstab.core.loss import token_log_ratio


class _Gated(TokenObjective):
    name = "gated"
    writes = {"gates"}

    def terms(self, batch, stat, state):
        return Terms(gates={"": Gate(self.gate_of(batch))})


@final
@dataclass(frozen=True)
class CISPO(_Gated):
    """arXiv 2506.13585: the weight of a log-prob is the ratio, at most ``1 + high``."""

    name = "cispo"
    high: float = 0.2

    def gate_of(self, batch):
        return lambda ratio, constants: ratio.clamp(max=1 + self.high) / ratio


class OneSided(TokenObjective):
    """Doubles the log-ratio of tokens that are punished once bonuses are counted."""

    name = "one_sided"
    writes = {"ratio"}

    def terms(self, batch, stat, state):
        def ratio(policy, constants):
            return torch.where(constants.advantages < 0, 2.0, 1.0) * token_log_ratio(policy, constants.anchor, batch)

        return Terms(ratio=ratio)
