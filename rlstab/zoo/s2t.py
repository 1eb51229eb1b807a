"""S2T: silence the spurious tokens of correct responses (STAPO)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.settings import Range
from rlstab.core.stats import Mean, Pool, Settled, Stat, Threshold
from rlstab.core.terms import Terms


@final
@dataclass(frozen=True)
class S2TMask(TokenObjective):
    """Drop rewarded tokens that were sampled with tiny probability where the policy was otherwise sure."""

    name: ClassVar[str] = "s2t"
    needs = frozenset({"entropies"})
    writes = frozenset({"keep"})

    max_prob: Annotated[float, Range(gt=0, le=1)] = 0.002
    quantile: Annotated[float, Range(ge=0, le=1)] = 0.75
    population: Literal["candidates", "all"] = "candidates"

    def measure(self, batch: TokenBatch) -> Stat:
        entropies = batch.signal("entropies")
        pool = entropies[self._candidates(batch)] if self.population == "candidates" else entropies
        return {"entropy": Pool.quantile(pool, self.quantile)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        threshold = stat["entropy"]
        assert isinstance(threshold, Threshold)
        candidates = self._candidates(batch)
        spurious = candidates & threshold.below(batch.signal("entropies"))
        report = {
            "threshold": threshold.report(),
            "candidates": Mean.of(candidates),
            "silenced": Mean.of(spurious),
        }
        return Terms(keep=~spurious, report=report)

    def _candidates(self, batch: TokenBatch) -> Tensor:
        return (batch.advantages > 0) & (batch.logprobs.double() < math.log(self.max_prob))
