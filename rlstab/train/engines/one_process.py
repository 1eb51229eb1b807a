"""One process: nothing to divide and nobody to wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import final

from torch import Tensor

from rlstab.signals import TokenSignals
from rlstab.train.engines.engine import Part
from rlstab.train.engines.whole_weights import WholeWeights
from rlstab.train.padded_rows import Sequences
from rlstab.train.shared_prompts import SharedPrompts


@final
class OneProcess(WholeWeights):
    """The policy as it is."""

    @property
    def in_words(self) -> str:
        return "one process"

    def rounds(self, parts: Sequence[Part]) -> Iterator[Part | None]:
        yield from parts

    def signals(
        self,
        sequences: Sequences,
        index: Tensor,
        *,
        temperature: float,
        needs: Set[str],
        options: Mapping[str, float],
        rows: Mapping[str, Tensor] | None = None,
        shared: SharedPrompts | None = None,
    ) -> TokenSignals:
        return self.policy.signals(
            sequences, index, temperature=temperature, needs=needs, options=options, rows=rows, shared=shared
        )

    def backward(self, loss: Tensor | None) -> None:
        if loss is not None:
            loss.backward()
