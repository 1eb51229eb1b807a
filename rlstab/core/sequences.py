"""Arithmetic per sequence: sums, means, quantiles and running sums over the tokens of each response.

A sequence is never cut across batches, so what is computed here never depends on how an optimizer step was cut.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from rlstab.core.devices import sent


class SequenceArithmetic:
    """For a batch of ``n`` tokens in ``S`` sequences. Sums are float64; tokens may be in any order.

    Attributes:
        sequence: ``(n,)`` int64, index of the token's sequence, in ``[0, S)``.
        position: ``(n,)`` int64, position of the token in its response.
        sequence_ids: ``(S,)`` int64.
    """

    sequence: Tensor
    position: Tensor
    sequence_ids: Tensor

    @property
    def here(self) -> SequenceArithmetic:
        """The same tokens on the CPU if a copy is there, so that reading a value does not wait for a device."""
        return self

    @property
    def num_sequences(self) -> int:
        """``S``, sequences without a token included."""
        return self.sequence_ids.numel()

    @cached_property
    def lengths(self) -> Tensor:
        """``(S,)`` float64, number of tokens of each sequence."""
        return self.sequence_total(torch.ones_like(self.sequence))

    def sequence_total(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """``(S,)`` float64 sums of ``(n,)`` values over each sequence, or over its tokens where the bool is True."""
        values = values.double()
        if where is not None:
            values = torch.where(where, values, 0.0)
        zeros = torch.zeros(self.num_sequences, dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.sequence, values)

    def sequence_mean(self, values: Tensor, where: Tensor | None = None) -> Tensor:
        """``(S,)`` float64 means over each sequence, or over its tokens where the bool is True; 0 without tokens."""
        count = self.lengths if where is None else self.sequence_total(where)
        return self.sequence_total(values, where) / count.clamp(min=1)

    def sequence_quantile(self, values: Tensor, q: float) -> Tensor:
        """``(S,)`` float64 q-quantiles of each sequence, linear between order statistics (position ``q (n - 1)``).

        NaN without tokens.
        """
        if not values.numel():
            return torch.full((self.num_sequences,), math.nan, dtype=torch.float64, device=values.device)
        upper, size = q >= 0.5, self.lengths.long()
        rows = self._rows(values.double(), -math.inf if upper else math.inf)
        # only the end of each row that holds the position, which is further in for longer rows
        reach = (1 - q if upper else q) * (self._longest - 1)
        ordered = rows.topk(min(self._longest, math.floor(reach) + 3), largest=upper).values
        position = q * (size - 1).clamp(min=0).double()
        integer = position.round()
        rounds = (position - integer).abs() <= 4e-15 * integer.clamp(min=1)  # 0.57 * 100
        position = torch.where(rounds, integer, position)
        ends = torch.stack([position.floor(), position.ceil()], 1).long()
        ends = (size[:, None] - 1 - ends if upper else ends).clamp(min=0)
        low, high = ordered.gather(1, ends).unbind(1)
        return torch.where(size > 0, low + (high - low) * (position - position.floor()), math.nan)

    def spread(self, values: Tensor) -> Tensor:
        """``(n,)``: for each token the ``(S,)`` value of its sequence, in the dtype of the values."""
        return values.index_select(0, self.sequence)

    def running_total(self, values: Tensor, *, reverse: bool = False, decay: float = 1.0) -> Tensor:
        """``(n,)`` float64 sums over the tokens of the sequence up to and including this one.

        With ``reverse`` from this one to the end. The ``k``-th token from this one counts ``decay**k``.
        """
        values = values.double()
        # a row per sequence: one running sum over all tokens would carry the rounding of one sequence into the next
        rows = self._rows(values, 0.0)
        total = _decayed_sum(rows.flip(1), decay).flip(1) if reverse else _decayed_sum(rows, decay)
        return total.reshape(-1).index_select(0, self._cell)

    @cached_property
    def index_in_sequence(self) -> Tensor:
        """``(n,)`` int64: the number of tokens of the sequence before this one, by position."""
        return self._cell - self.sequence * self._longest

    @cached_property
    def _cell(self) -> Tensor:
        """``(n,)`` int64: index of each token in the rows of :meth:`_rows`, by position."""
        if self.here is not self:
            return sent(self.here._cell, self.sequence.device)
        step, start = self.sequence.diff(), self.lengths.long().cumsum(0) - self.lengths.long()
        packed = bool(((step > 0) | ((step == 0) & (self.position.diff() > 0))).all())  # as packing leaves them
        order = None if packed else self.position.argsort(stable=True)
        if order is not None:
            order = order[self.sequence[order].argsort(stable=True)]
        row = self.sequence if order is None else self.sequence[order]
        lies = (self._longest * row).sub_(start[row]).add_(torch.arange(row.numel(), device=row.device))
        return lies if order is None else torch.empty_like(order).index_copy_(0, order, lies)

    @cached_property
    def _longest(self) -> int:
        lengths = self.here.lengths
        return int(lengths.max()) if lengths.numel() else 0

    def _rows(self, values: Tensor, fill: float) -> Tensor:
        """``(S, T)``: the ``(n,)`` values of each sequence from the left; ``fill`` behind them."""
        size = self.num_sequences * self._longest
        rows = torch.full((size,), fill, dtype=values.dtype, device=values.device)
        return rows.index_copy_(0, self._cell, values).view(self.num_sequences, self._longest)


def _decayed_sum(rows: Tensor, decay: float) -> Tensor:
    """``(S, T)`` with ``out[:, t] = rows[:, t] + decay * out[:, t - 1]``, in ``log2 T`` passes over the rows."""
    if decay == 1:
        return rows.cumsum(1)
    reach = 1
    while reach < rows.shape[1]:  # after k passes each sum reaches back 2^k tokens
        rows[:, reach:] += decay**reach * rows[:, :-reach]
        reach *= 2
    return rows
