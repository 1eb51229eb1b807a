"""Adaptive entropy coefficient: pay for entropy only below a target, at a price that a controller sets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, final

from torch import Tensor

from rlstab.core.batch import PolicyOutputs, TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.settings import Range
from rlstab.core.stats import Mean, Settled, Stat
from rlstab.core.terms import Penalty, Terms


@final
@dataclass(frozen=True)
class AdaptiveEntropy(TokenObjective):
    """Pay for entropy while it is below a target; the price rises while it stays there and falls once it does not."""

    name: ClassVar[str] = "adaptive_entropy"
    needs = frozenset({"entropies"})
    live_needs = frozenset({"entropies"})
    writes = frozenset({"penalties"})

    target_entropy: Annotated[float, Range(ge=0)] = 0.2
    initial: Annotated[float, Range(ge=0)] = 0.0
    step: Annotated[float, Range(ge=0)] = 0.0001
    low: Annotated[float, Range(ge=0)] = 0.0
    high: Annotated[float, Range(ge=0)] = 0.005

    def init_state(self) -> State:
        return {"active": False, "coefficient": self.initial, "next_coefficient": self.initial}

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def advance(self, state: State, stat: Settled) -> State:
        mean = stat["entropy"]
        assert isinstance(mean, Mean)
        now = state["next_coefficient"]
        if math.isnan(mean.value):
            return {**state, "coefficient": now}
        active = mean.value < self.target_entropy
        moved = now + (self.step if active else -self.step)
        return {"active": active, "coefficient": now, "next_coefficient": min(max(moved, self.low), self.high)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        price = state["coefficient"] if state["active"] else 0.0
        report = {"coefficient": Mean.scalar(price)}
        if price == 0:
            return Terms(report=report)
        return Terms(penalties={"": Penalty(-price, _entropy, reads=frozenset({"entropies"}))}, report=report)


def _entropy(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
    return policy.signal("entropies")
