"""Entropy bonus: pay for uncertainty on every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

from torch import Tensor

from rlstab.core.batch import PolicyOutputs, TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.settings import Range
from rlstab.core.stats import Settled
from rlstab.core.terms import Penalty, Terms


@final
@dataclass(frozen=True)
class EntropyBonus(TokenObjective):
    """Subtract ``coefficient`` times the mean entropy from the loss."""

    name: ClassVar[str] = "entropy_bonus"
    live_needs = frozenset({"entropies"})
    writes = frozenset({"penalties"})

    coefficient: Annotated[float, Range(ge=0)] = 0.001

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(penalties={"": Penalty(-self.coefficient, _entropy, reads=frozenset({"entropies"}))})


def _entropy(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
    return policy.signal("entropies")
