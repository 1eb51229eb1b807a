"""Clip-higher: a trust region that leaves more room upwards (DAPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

from rlstab.core.batch import TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.settings import Range
from rlstab.core.stats import Settled
from rlstab.core.terms import Bounds, Terms


@final
@dataclass(frozen=True)
class ClipHigher(TokenObjective):
    """Stop a token from pulling once its ratio has left ``[1 - low, 1 + high]``."""

    name: ClassVar[str] = "clip_higher"
    writes = frozenset({"bounds"})

    low: Annotated[float, Range(ge=0, le=1)] = 0.2
    high: Annotated[float, Range(ge=0)] = 0.28
    dual_clip: Annotated[float | None, Range(gt=1)] = None

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(bounds=Bounds(self.low, self.high, self.dual_clip))
