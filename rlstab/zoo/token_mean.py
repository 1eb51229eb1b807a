"""Token mean: every token of the step weighs the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from rlstab.core.batch import TokenBatch
from rlstab.core.loss import token_mean
from rlstab.core.objective import State, TokenObjective
from rlstab.core.stats import Settled
from rlstab.core.terms import Terms


@final
@dataclass(frozen=True)
class TokenMean(TokenObjective):
    """Average over all tokens of the optimizer step: the default, said aloud."""

    name: ClassVar[str] = "token_mean"
    writes = frozenset({"aggregate"})

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(aggregate=token_mean)
