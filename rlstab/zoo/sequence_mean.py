"""Sequence mean: every response of the step weighs the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.stats import Settled
from rlstab.core.terms import Terms, Totals


@final
@dataclass(frozen=True)
class SequenceMean(TokenObjective):
    """Average over the tokens of a response, then over responses."""

    name: ClassVar[str] = "sequence_mean"
    writes = frozenset({"aggregate"})

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(aggregate=_sequence_mean)


def _sequence_mean(sequence: Tensor, counted: Tensor, num_sequences: int, totals: Totals) -> Tensor:
    lengths = torch.zeros(num_sequences, dtype=torch.float64, device=sequence.device)
    lengths = lengths.index_add(0, sequence, counted.double())
    return 1.0 / (totals.sequences * lengths[sequence].clamp(min=1.0))
