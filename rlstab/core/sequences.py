"""Arithmetic per sequence: sums, means, quantiles and running sums over the tokens of each response.

A sequence is never cut across batches, so what is computed here never depends on how an optimizer step was cut.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional


class SequenceArithmetic:
    """For a batch of ``n`` tokens in ``S`` sequences. Sums are float64; tokens may be in any order.

    Attributes:
        sequence: ``(n,)`` int64, index of the token's sequence, in ``[0, S)``.
        position: ``(n,)`` int64, place of the token in its response.
        sequence_ids: ``(S,)`` int64.
    """

    sequence: Tensor
    position: Tensor
    sequence_ids: Tensor

    @property
    def num_sequences(self) -> int:
        """``S``, sequences without a token included."""
        return self.sequence_ids.numel()

    @cached_property
    def lengths(self) -> Tensor:
        """``(S,)`` float64, tokens of each sequence; 0 where it has none."""
        return self.sequence_total(torch.ones_like(self.sequence))

    def sequence_total(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """``(S,)`` float64 sums of ``(n,)`` values over each sequence, or over its tokens where the bool is True."""
        values = values.double()
        if where is not None:
            values = torch.where(where, values, 0.0)
        zeros = torch.zeros(self.num_sequences, dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.sequence, values)

    def sequence_mean(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """``(S,)`` float64 means over each sequence, or over its tokens where the bool is True; 0 of no token."""
        count = self.lengths if where is None else self.sequence_total(where)
        return self.sequence_total(values, where) / count.clamp(min=1)

    def sequence_quantile(self, values: Tensor, q: float) -> Tensor:
        """``(S,)`` float64 q-quantiles of each sequence, linear between order statistics (position ``q (n - 1)``).

        NaN of no token.
        """
        found = torch.full((self.num_sequences,), math.nan, dtype=torch.float64, device=values.device)
        if not values.numel():
            return found
        order = values.argsort(stable=True)
        order = order[self.sequence[order].argsort(stable=True)]
        ordered, size = values.double()[order], self.lengths.long()
        start, place = size.cumsum(0) - size, q * (size - 1).clamp(min=0).double()
        whole = place.round()
        place = torch.where((place - whole).abs() <= 4e-15 * whole.clamp(min=1), whole, place)  # 0.57 * 100
        last = ordered.numel() - 1
        low = ordered[(start + place.floor().long()).clamp(max=last)]
        high = ordered[(start + place.ceil().long()).clamp(max=last)]
        return torch.where(size > 0, low + (high - low) * (place - place.floor()), found)

    def spread(self, values: Tensor) -> Tensor:
        """``(n,)``: for each token the ``(S,)`` value of its sequence, in the dtype of the values."""
        return values[self.sequence]

    def running_total(self, values: Tensor, *, reverse: bool = False, decay: float = 1.0) -> Tensor:
        """``(n,)`` float64 sums over the tokens of the sequence up to this one, itself included.

        With ``reverse`` from this one to the end. The ``k``-th token from this one counts ``decay**k``.
        """
        values = values.double()
        if not values.numel():
            return values
        order = self.position.argsort(stable=True, descending=reverse)
        order = order[self.sequence[order].argsort(stable=True)]
        size = self.lengths.long()
        column = torch.arange(order.numel(), device=order.device) - self.spread(size.cumsum(0) - size)[order]
        # a row per sequence: one running sum over all tokens would carry the rounding of one sequence into the next
        rows = torch.zeros(self.num_sequences, int(size.max()), dtype=torch.float64, device=values.device)
        rows[self.sequence[order], column] = values[order]
        total = torch.empty_like(values)
        total[order] = _decayed_sum(rows, decay)[self.sequence[order], column]
        return total


def _decayed_sum(rows: Tensor, decay: float) -> Tensor:
    """``(S, T)`` with ``out[:, t] = rows[:, t] + decay * out[:, t - 1]``, in ``log2 T`` passes."""
    if decay == 1:
        return rows.cumsum(1)
    reach = 1
    while reach < rows.shape[1]:  # after k passes each sum reaches back 2^k tokens
        rows = rows + decay**reach * functional.pad(rows[:, :-reach], (reach, 0))
        reach *= 2
    return rows
