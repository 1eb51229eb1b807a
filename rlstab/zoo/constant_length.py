"""Constant length: sum over a response, divided by one fixed length (Dr. GRPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, final

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.settings import Range
from rlstab.core.stats import Settled
from rlstab.core.terms import Terms, Totals


@final
@dataclass(frozen=True)
class ConstantLength(TokenObjective):
    """Average over responses of token sums, divided by one constant length: no bias towards short answers."""

    name: ClassVar[str] = "constant_length"
    writes = frozenset({"aggregate"})

    length: Annotated[int, Range(ge=1)]

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def constant(sequence: Tensor, counted: Tensor, num_sequences: int, totals: Totals) -> Tensor:
            return torch.full_like(counted, 1.0 / (totals.sequences * self.length), dtype=torch.float64)

        return Terms(aggregate=constant)
