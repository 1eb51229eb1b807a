"""Published methods as gates, and a ratio. They exist for the tests; sources stand beside each.

CISPO and VESPO ship as pulls. As gates they act beside a trust region, beside each other and within a mask.
"""

import math
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


def pick(positive, yes, no):
    """One of two numbers per token, in float64: ``torch.where`` of two Python numbers is float32."""
    return torch.where(positive, torch.tensor(yes, dtype=torch.float64), torch.tensor(no, dtype=torch.float64))


@final
@dataclass(frozen=True)
class CISPO(_Gated):
    """arXiv 2506.13585: the weight of a log-prob is the ratio, at most ``1 + high``."""

    name = "cispo"
    high: float = 0.2

    def gate_of(self, batch):
        return lambda ratio, constants: ratio.clamp(max=1 + self.high) / ratio


class VESPO(TokenObjective):
    """arXiv 2602.10693: a kernel of the weight of the whole sequence, not normalised by its length."""

    name = "vespo"
    writes = {"gates"}

    def terms(self, batch, stat, state):
        def gate(ratio, constants):
            gap = token_log_ratio(constants.anchor, constants.anchor, batch).clamp(-20, 20)
            s = batch.spread(batch.sequence_total(gap).clamp(math.log(1e-8), 20.0))
            k, lam = pick(constants.advantages >= 0, 2.0, 3.0), pick(constants.advantages >= 0, 3.0, 2.0)
            return (lam + k * s - lam * s.exp()).exp() / ratio

        return Terms(gates={"": Gate(gate, whole_sequences=True)})


class OneSided(TokenObjective):
    """Doubles the log-ratio of tokens that are punished once bonuses are counted."""

    name = "one_sided"
    writes = {"ratio"}

    def terms(self, batch, stat, state):
        def ratio(policy, constants):
            return torch.where(constants.advantages < 0, 2.0, 1.0) * token_log_ratio(policy, constants.anchor, batch)

        return Terms(ratio=ratio)
