"""20-Entropy: learn from the forking tokens only (Beyond the 80/20 rule)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

from rlstab.core.batch import TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.settings import Range
from rlstab.core.stats import Mean, Pool, Settled, Stat, Threshold
from rlstab.core.terms import Terms


@final
@dataclass(frozen=True)
class TopEntropyMask(TokenObjective):
    """Keep the tokens at which the policy was least sure, drop the rest."""

    name: ClassVar[str] = "top_entropy"
    needs = frozenset({"entropies"})

    share: Annotated[float, Range(gt=0, le=1)] = 0.2
    denominator: Literal["kept", "all"] = "kept"

    @property
    def writes(self) -> frozenset[str]:
        return frozenset({"keep" if self.denominator == "kept" else "weight"})

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Pool.quantile(batch.signal("entropies"), 1 - self.share)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        threshold = stat["entropy"]
        assert isinstance(threshold, Threshold)
        forking = threshold.reached(batch.signal("entropies"))
        report = {"threshold": threshold.report(), "share": Mean.of(forking)}
        if self.denominator == "kept":
            return Terms(keep=forking, report=report)
        return Terms(weight=forking.to(batch.advantages.dtype), report=report)
