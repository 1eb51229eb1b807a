"""Mergeable summaries: a value seen in parts, whose total does not depend on how the parts were cut.

Sums travel and means are taken at the end; thresholds are exact order statistics of the pooled values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from rlstab.core.chunks import chunks
from rlstab.core.comm import Comm, LocalComm
from rlstab.core.compare import below, places, reached
from rlstab.core.select import Found, select


def total(values: Tensor) -> Tensor:
    """Sum in float64, a scalar. In pieces, because torch casts before it adds."""
    return torch.stack([chunk.sum(dtype=torch.float64) for (chunk,) in chunks(values.reshape(-1))]).sum()


@dataclass(frozen=True, eq=False)
class Mean:
    """A sum and a count, both float64 scalars; merging adds them."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, where: Tensor | None = None) -> Mean:
        """Summary of ``(n,)`` values, or of those where the ``(n,)`` bool is True. A bool counts as 0 or 1."""
        values = values.detach()
        if where is None:
            count = torch.tensor(float(values.numel()), dtype=torch.float64)
        else:  # sums over a mask take a fraction of the time of picking the values first
            count = where.count_nonzero().double().cpu()
            values = values & where if values.dtype == torch.bool else torch.where(where, values, 0.0)
        return cls(values.count_nonzero().double() if values.dtype == torch.bool else total(values), count)

    @classmethod
    def scalar(cls, value: float) -> Mean:
        """A number of the step, the same in every part."""
        return cls(torch.tensor(value, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))

    def merge(self, other: Mean) -> Mean:
        """The summary of both parts."""
        return Mean(self.total.cpu() + other.total.cpu(), self.count + other.count)

    @property
    def value(self) -> float:
        """The mean, NaN when nothing was counted."""
        return float(self.total) / float(self.count) if float(self.count) else math.nan


Rule: TypeAlias = Literal["linear", "ceil", "floor"]


@dataclass(frozen=True, eq=False)
class Pool:
    """Values whose order statistic becomes a threshold once all parts are there; merging lists the parts.

    Make one with :meth:`quantile` or :meth:`top`.

    Attributes:
        parts: one-dimensional float32 or float64 tensors, each on the device where it was measured.
        level: q, or the share.
        rule: how the level becomes a place among the sorted values.
    """

    parts: tuple[Tensor, ...]
    level: float
    rule: Rule

    @classmethod
    def quantile(cls, values: Tensor, q: float, where: Tensor | None = None) -> Pool:
        """The q-quantile with linear interpolation between order statistics (position ``q (n - 1)``).

        Of ``(n,)`` values, or of those where the ``(n,)`` bool is True.
        """
        return cls((_wide(values, where),), q, "linear")

    @classmethod
    def top(
        cls,
        values: Tensor,
        share: float,
        where: Tensor | None = None,
        *,
        rounding: Literal["ceil", "floor"] = "ceil",
    ) -> Pool:
        """The k-th largest value: at least k values reach it, more only by ties.

        ``k = ceil(share * n)``, or with ``floor``, which some published code uses, ``max(1, floor(share * n))``. Of
        ``(n,)`` values, or of those where the ``(n,)`` bool is True.
        """
        return cls((_wide(values, where),), share, rounding)

    def merge(self, other: Pool) -> Pool:
        """The pool of both parts."""
        return Pool(self.parts + other.parts, self.level, self.rule)

    def threshold(self) -> Threshold:
        """The exact order statistic of the values of this process."""
        return _thresholds({"": self}, LocalComm())[""]

    def _ranks(self, size: int) -> tuple[int, ...]:
        """Which of ``size`` values, counted from the smallest, make the threshold: one, or two to lie between."""
        if not size:
            return ()
        if self.rule == "linear":
            place = _whole(self.level * (size - 1))
            below = math.floor(place)
            return (below + 1,) if below == place else (below + 1, below + 2)
        share = _whole(self.level * size)
        largest = math.ceil(share) if self.rule == "ceil" else math.floor(share)
        return (size + 1 - min(size, max(1, largest)),)

    def _settled(self, found: Found) -> Threshold:
        """The interpolation is in float64, whatever the values are."""
        if not found.size:
            return Threshold(None, 0, 0)
        low, high = found.values[0], found.values[-1]
        ranks = self._ranks(found.size)
        nominal = found.size + 1 - ranks[-1]
        if low == high:
            return Threshold(low, found.size, nominal)
        place = _whole(self.level * (found.size - 1))
        return Threshold(low + (high - low) * (place - math.floor(place)), found.size, nominal)

    def _joined(self) -> Tensor:
        """All values of this process; empty parts have no say in dtype or device."""
        parts = [one for one in self.parts if one.numel()] or [self.parts[0]]
        return parts[0] if len(parts) == 1 else torch.cat([one.to(parts[0].device) for one in parts])


def _wide(values: Tensor, where: Tensor | None) -> Tensor:
    """``(n,)`` float32 for half precision, float64 for what is no float: nothing is rounded."""
    values = values.detach().reshape(-1)
    if where is not None:
        values = values.index_select(0, places(where.reshape(-1)))  # faster than by the mask
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.float() if values.is_floating_point() else values.double()


def _thresholds(pools: Mapping[str, Pool], comm: Comm) -> dict[str, Threshold]:
    """What the pools settle to: their values stay where they are, and what is summed over ranks they share."""
    found = select({name: (one._joined(), one._ranks) for name, one in pools.items()}, comm)
    return {name: one._settled(found[name]) for name, one in pools.items()}


def _whole(place: float) -> float:
    """``place``, or the integer that it misses only by rounding: 0.57 * 100 is 56.99999999999999."""
    return float(round(place)) if math.isclose(place, round(place), rel_tol=4e-15, abs_tol=1e-9) else place


@dataclass(frozen=True)
class Threshold:
    """What a :class:`Pool` settles to. Comparisons are those of float64, so no dtype can move a tie.

    Attributes:
        value: None when the pool was empty; then nothing compares as True.
        size: how many values the pool had, over the whole step.
        nominal: how many of them reach the threshold when there are no ties.
    """

    value: float | None
    size: int
    nominal: int

    def below(self, values: Tensor) -> Tensor:
        """``(n,)`` bool, ``values < threshold``."""
        return self._none(values) if self.value is None else below(values, self.value)

    def reached(self, values: Tensor) -> Tensor:
        """``(n,)`` bool, ``values >= threshold``."""
        return self._none(values) if self.value is None else reached(values, self.value)

    def report(self) -> Mean:
        """The threshold as a metric: absent (count 0) when the pool was empty."""
        return Mean.of(torch.zeros(0)) if self.value is None else Mean.scalar(self.value)

    @staticmethod
    def _none(values: Tensor) -> Tensor:
        return torch.zeros_like(values, dtype=torch.bool)


Summary: TypeAlias = Mean | Pool
#: What a method measures on one part: summaries by name.
Stat: TypeAlias = Mapping[str, Summary]
#: The same over the whole step: means and thresholds by name; a composition nests one mapping a member.
Settled: TypeAlias = Mapping[str, "Mean | Threshold | Settled"]

NOTHING: Stat = {}


def merge(one: Stat, other: Stat) -> Stat:
    """The statistics of both parts."""
    return {name: _merge(one[name], other[name]) for name in one}


def _merge(one: Summary, other: Summary) -> Summary:
    if isinstance(one, Mean) and isinstance(other, Mean):
        return one.merge(other)
    if isinstance(one, Pool) and isinstance(other, Pool):
        return one.merge(other)
    raise TypeError(f"cannot merge {type(one).__name__} with {type(other).__name__}")


def settle(parts: Iterable[Stat], comm: Comm) -> dict[str, Mean | Threshold]:
    """Merge the parts of this rank, reduce over ranks, and turn pools into thresholds.

    All means travel in one sum. The pools share three (six for float64) of at most 32 KB a pool; no value travels,
    unless a pool is so small that it is gathered after the first of them. Every rank passes the same names (a rank
    without tokens passes the statistics of an empty batch).
    """
    total: Stat | None = None
    for part in parts:
        total = part if total is None else merge(total, part)
    settled: dict[str, Mean | Threshold] = {}
    means = {name: one for name, one in sorted((total or {}).items()) if isinstance(one, Mean)}
    if means:
        flat = torch.stack([torch.stack([one.total.cpu(), one.count.cpu()]) for one in means.values()])
        for name, row in zip(means, comm.sum(flat), strict=True):
            settled[name] = Mean(row[0], row[1])
    pools = {name: one for name, one in (total or {}).items() if isinstance(one, Pool)}
    return {**settled, **_thresholds(pools, comm)} if pools else settled
