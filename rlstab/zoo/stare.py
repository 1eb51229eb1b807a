"""STARE: boost the few rare tokens that move entropy most, while entropy is below a target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch

from rlstab.core.batch import TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.settings import Range
from rlstab.core.stats import Mean, Pool, Settled, Stat, Threshold
from rlstab.core.terms import Terms


@final
@dataclass(frozen=True)
class STARE(TokenObjective):
    """Weight rewarded rare tokens up (and, in C2, punished ones down) while the mean entropy is below a target."""

    name: ClassVar[str] = "stare"
    needs = frozenset({"entropies"})
    writes = frozenset({"weight"})

    target_entropy: Annotated[float, Range(ge=0)] = 0.3
    variant: Literal["O1", "C2"] = "O1"
    share: Annotated[float, Range(gt=0, le=1)] = 0.1
    boost: Annotated[float, Range(ge=1)] = 1.1
    damp: Annotated[float, Range(ge=0, le=1)] = 0.9
    step: Annotated[float, Range(ge=0)] = 0.0
    max_boost: Annotated[float, Range(ge=1)] = 1.5
    min_damp: Annotated[float, Range(ge=0, le=1)] = 0.5

    def init_state(self) -> State:
        return {"gate": True, "boost": self.boost, "damp": self.damp, "next_boost": self.boost, "next_damp": self.damp}

    def measure(self, batch: TokenBatch) -> Stat:
        surprisal = -batch.logprobs
        return {
            "entropy": Mean.of(batch.signal("entropies")),
            "rewarded": Pool.top(surprisal[batch.advantages > 0], self.share),
            "punished": Pool.top(surprisal[batch.advantages < 0], self.share),
        }

    def advance(self, state: State, stat: Settled) -> State:
        mean = stat["entropy"]
        assert isinstance(mean, Mean)
        entropy = mean.value
        boost, damp = state["next_boost"], state["next_damp"]
        gap = self.target_entropy - entropy
        move = math.copysign(self.step, gap) if gap else 0.0
        if math.isnan(entropy) or not self.step:
            return {**state, "gate": state["gate"] if math.isnan(entropy) else gap > 0, "boost": boost, "damp": damp}
        return {
            "gate": gap > 0,
            "boost": boost,
            "damp": damp,
            "next_boost": min(max(boost + move, 1.0), self.max_boost),
            "next_damp": min(max(damp - move, self.min_damp), 1.0),
        }

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        report = {"gate": Mean.scalar(float(state["gate"])), "boost": Mean.scalar(state["boost"])}
        if not state["gate"]:
            return Terms(report=report)
        rewarded, punished = stat["rewarded"], stat["punished"]
        assert isinstance(rewarded, Threshold)
        assert isinstance(punished, Threshold)
        surprisal = -batch.logprobs
        weight = torch.ones_like(surprisal)
        boosted = (batch.advantages > 0) & rewarded.reached(surprisal)
        weight = torch.where(boosted, state["boost"], weight)
        report |= {"threshold": rewarded.report(), "boosted": Mean.of(boosted)}
        if self.variant == "C2":
            damped = (batch.advantages < 0) & punished.reached(surprisal)
            weight = torch.where(damped, state["damp"], weight)
            report["damped"] = Mean.of(damped)
        return Terms(weight=weight, report=report)
