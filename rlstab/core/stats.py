"""Mergeable summaries: a value seen in parts, whose total does not depend on the split.

Sums travel and means are taken at the end; thresholds are exact order statistics of the pooled values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from rlstab.core.batch import widened
from rlstab.core.comm import Comm, Gather, LocalComm, Read, Rounds, Sum, carried_out
from rlstab.core.compare import below, chunks, indices, reached
from rlstab.core.devices import sent
from rlstab.core.mean_within import beyond_budget
from rlstab.core.method_settings import check_choices
from rlstab.core.order_statistics import OrderStatistics, selection
from rlstab.errors import MethodError, OutOfRange


def total(values: Tensor) -> Tensor:
    """Sum in float64, a scalar; in pieces, because torch casts the whole tensor before it adds."""
    sums = [chunk.sum(dtype=torch.float64) for (chunk,) in chunks(values.reshape(-1))]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


@dataclass(frozen=True, eq=False)
class Mean:
    """A sum and a count, both float64 scalars on any device; merging adds them, and only ``value`` reads them."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, where: Tensor | None = None) -> Mean:
        """Summary of ``(n,)`` values, or of those where the ``(n,)`` bool is True. A bool counts as 0 or 1."""
        values = values.detach()
        if where is None:
            number = torch.tensor(float(values.numel()), dtype=torch.float64)
        else:  # sums over a mask take a fraction of the time of selecting the values first
            number = where.count_nonzero().double()
            values = values & where if values.dtype == torch.bool else torch.where(where, values, 0.0)
        return cls(values.count_nonzero().double() if values.dtype == torch.bool else total(values), number)

    @classmethod
    def scalar(cls, value: float) -> Mean:
        """A number of the optimizer step, the same in every part."""
        return cls(torch.tensor(value, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))

    def _tensors(self) -> list[Tensor]:
        return [self.total, self.count]

    def _read(self, tensors: Iterator[Tensor]) -> Mean:
        return Mean(next(tensors), next(tensors))

    def merge(self, other: Mean) -> Mean:
        """The summary of both parts."""
        return Mean(_plus(self.total, other.total), _plus(self.count, other.count))

    @property
    def value(self) -> float:
        """The mean, NaN when nothing was counted."""
        return float(self.total) / float(self.count) if float(self.count) else math.nan


def _plus(first: Tensor, second: Tensor) -> Tensor:
    """The sum of two scalars, on the device if one is there, without waiting for it."""
    device = first.device if first.device.type != "cpu" else second.device
    return first.to(device) + second.to(device)


@dataclass(frozen=True, eq=False)
class Grouped:
    """Sums and counts by an integer key, such as ``group_ids``, for groups that several parts may share.

    Make one with :meth:`of`. It settles to itself over the whole optimizer step: every rank holds all keys, in order.

    Attributes:
        keys: ``(k,)`` int64; once settled, ascending and distinct.
        totals: ``(k,)`` float64.
        counts: ``(k,)`` float64.
    """

    keys: Tensor
    totals: Tensor
    counts: Tensor

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, where: Tensor | None = None) -> Grouped:
        """Summary of ``(m,)`` values under ``(m,)`` int64 keys, or of those where the ``(m,)`` bool is True.

        Of responses: ``Grouped.of(batch.group_ids, batch.sequence_mean(entropies))``. Of tokens:
        ``Grouped.of(batch.spread(batch.group_ids), entropies)``.
        """
        values = values.detach().double()
        counts = torch.ones_like(values)
        if where is not None:
            values, counts = torch.where(where, values, 0.0), where.double()
        return cls(keys.long(), values, counts)

    @functools.cached_property
    def _summed(self) -> Grouped:
        """With one row for each key that has a count, in order; waits for a device."""
        counted = self.counts > 0
        keys, index = torch.unique(self.keys[counted], sorted=True, return_inverse=True)
        zeros = torch.zeros(keys.shape, dtype=torch.float64, device=keys.device)
        totals, counts = (zeros.index_add(0, index, column[counted]) for column in (self.totals, self.counts))
        return Grouped(keys, totals, counts)

    def _tensors(self) -> list[Tensor]:
        return [self.keys, self.totals, self.counts]

    def _read(self, tensors: Iterator[Tensor]) -> Grouped:
        return Grouped(next(tensors), next(tensors), next(tensors))

    def merge(self, other: Grouped) -> Grouped:
        """The summary of both parts."""
        pairs = zip(self._summed._tensors(), other._summed._tensors(), strict=True)
        return Grouped(*(torch.cat([first, second.to(first.device)]) for first, second in pairs))

    def mean(self, keys: Tensor) -> Tensor:
        """``(m,)`` float64 means under ``(m,)`` keys; NaN under a key without a count."""
        return self.total(keys) / self.count(keys)

    def total(self, keys: Tensor) -> Tensor:
        """``(m,)`` float64 sums under ``(m,)`` keys, 0 under an unknown one."""
        return self._look_up(keys, self._summed.totals)

    def count(self, keys: Tensor) -> Tensor:
        """``(m,)`` float64 counts under ``(m,)`` keys, 0 under an unknown one."""
        return self._look_up(keys, self._summed.counts)

    def _look_up(self, keys: Tensor, column: Tensor) -> Tensor:
        known_keys, column = (sent(values, keys.device) for values in (self._summed.keys, column))
        if not known_keys.numel():
            return torch.zeros(keys.shape, dtype=torch.float64, device=keys.device)
        index = torch.searchsorted(known_keys, keys).clamp(max=known_keys.numel() - 1)
        return torch.where(known_keys[index] == keys, column[index], 0.0)

    def _gathered(self, local: bool) -> Rounds[Grouped]:
        """Over all ranks. Keys travel in two halves: a float64 does not hold every int64."""
        summed = self._summed
        if local:
            return summed
        rows = [summed.keys >> 32, summed.keys & 0xFFFFFFFF, summed.totals, summed.counts]
        gathered = yield Gather(torch.stack([row.double() for row in rows], 1).reshape(-1))
        high, low, totals, counts = gathered.view(-1, 4).unbind(1)
        return Grouped((high.long() << 32) | low.long(), totals, counts)._summed


Rule: TypeAlias = Literal["linear", "ceil", "floor", "count", "budget"]


@dataclass(frozen=True, eq=False)
class Pool:
    """Values whose order statistic becomes a threshold once all parts are there; merging lists the parts.

    Make one with :meth:`quantile`, :meth:`top`, :meth:`largest` or :meth:`beyond_budget`.

    Attributes:
        parts: one-dimensional values, each on the device where it was measured, and the bools that say which of them
            are in the pool; None for all.
        level: q, the share, the number of values, or the budget.
        rule: how the level becomes a position among the sorted values.
    """

    parts: tuple[tuple[Tensor, Tensor | None], ...]
    level: float
    rule: Rule

    @classmethod
    def quantile(cls, values: Tensor, q: float, where: Tensor | None = None) -> Pool:
        """The q-quantile with linear interpolation between order statistics (position ``q (n - 1)``).

        Of ``(n,)`` values, or of those where the ``(n,)`` bool is True.
        """
        if not 0 <= q <= 1:
            raise OutOfRange(f"Pool.quantile: q = {q!r}, expected a number in [0, 1]. Divide a percentage by 100.")
        return cls((_part(values, where),), q, "linear")

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
        check_choices(Pool.top, rounding=rounding)
        if not 0 < share <= 1:
            raise OutOfRange(f"Pool.top: share = {share!r}, expected a number in (0, 1]. Divide a percentage by 100.")
        return cls((_part(values, where),), share, rounding)

    @classmethod
    def largest(cls, values: Tensor, count: int, where: Tensor | None = None) -> Pool:
        """The ``count``-th largest value, or the smallest where there are fewer; more reach it only by ties.

        Of ``(n,)`` values, or of those where the ``(n,)`` bool is True. The number is of the whole optimizer step, so
        it comes from a statistic: see ``measure_again``.
        """
        if count < 1:
            raise OutOfRange(f"Pool.largest: count = {count!r}, expected at least 1.")
        return cls((_part(values, where),), float(count), "count")

    @classmethod
    def beyond_budget(cls, values: Tensor, budget: float, where: Tensor | None = None) -> Pool:
        """The smallest value to remove, largest first, so that the mean of the rest is at most ``budget``.

        Equal values are removed together, and the smallest always stays. With nothing to remove, the threshold is None.
        Of ``(n,)`` values of at least 0, or of those where the ``(n,)`` bool is True; see
        :mod:`rlstab.core.mean_within`.
        """
        return cls((_part(values, where),), budget, "budget")

    def merge(self, other: Pool) -> Pool:
        """The pool of both parts."""
        return Pool(self.parts + other.parts, self.level, self.rule)

    def threshold(self) -> Threshold:
        """The exact order statistic of the values of this process."""
        return settle([{"": self}], LocalComm()).threshold("")

    def _tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part if tensor is not None]

    def _read(self, tensors: Iterator[Tensor]) -> Pool:
        parts = ((next(tensors), None if where is None else next(tensors)) for _, where in self.parts)
        return replace(self, parts=tuple(parts))

    def _ranks(self, size: int) -> tuple[int, ...]:
        """Which of ``size`` values, counted from the smallest, make the threshold: one, or two that it lies between."""
        if not size:
            return ()
        if self.rule == "linear":
            position = _whole(self.level * (size - 1))
            below = math.floor(position)
            return (below + 1,) if below == position else (below + 1, below + 2)
        if self.rule == "count":
            return (size + 1 - min(size, int(self.level)),)
        share = _whole(self.level * size)
        largest = math.ceil(share) if self.rule == "ceil" else math.floor(share)
        return (size + 1 - min(size, max(1, largest)),)

    def _settled(self, selected: OrderStatistics) -> Threshold:
        """Interpolate in float64, whatever the dtype of the values."""
        size, values = selected.size, selected.values
        if not size:
            return Threshold(None, 0, 0)
        value = values[0]
        if values[-1] != value:
            position = _whole(self.level * (size - 1))
            value += (values[-1] - value) * (position - math.floor(position))
        return Threshold(value, size, nominal=size + 1 - self._ranks(size)[-1])

    def _joined(self) -> Tensor:
        """All values of this process, half precision as float32 and integers as float64, without rounding."""
        wide = []
        for values, where in self.parts:
            selected = values if where is None else values.index_select(0, indices(where))  # faster than by the mask
            wide.append(widened(selected) if selected.is_floating_point() else selected.double())
        parts = [values for values in wide if values.numel()] or wide[:1]  # empty ones do not determine the dtype
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _part(values: Tensor, where: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return values.detach().reshape(-1), None if where is None else where.reshape(-1)


def _whole(position: float) -> float:
    """``position``, or the integer that it misses only by rounding: 0.57 * 100 is 56.99999999999999."""
    return float(round(position)) if math.isclose(position, round(position), rel_tol=4e-15, abs_tol=1e-9) else position


@dataclass(frozen=True)
class Threshold:
    """What a :class:`Pool` settles to. Comparisons are those of float64, so no dtype can move a tie.

    Attributes:
        value: None if the pool was empty, or nothing is beyond a budget; then every comparison is False.
        size: number of values in the pool, over the whole step.
        nominal: how many of them reach the threshold without ties.
    """

    value: float | None
    size: int
    nominal: int

    def below(self, values: Tensor) -> Tensor:
        """``(n,)`` bool, ``values < threshold``."""
        return below(values, self._number)

    def reached(self, values: Tensor) -> Tensor:
        """``(n,)`` bool, ``values >= threshold``."""
        return reached(values, self._number)

    def report(self) -> Mean:
        """The threshold as a metric: absent (count 0) when the pool was empty."""
        return Mean.of(torch.zeros(0)) if self.value is None else Mean.scalar(self.value)

    @property
    def _number(self) -> float:
        return math.nan if self.value is None else self.value  # nothing compares with NaN as True


Summary: TypeAlias = Mean | Pool | Grouped
#: What a method measures on one part: summaries by name.
Stat: TypeAlias = Mapping[str, Summary]

#: The summaries of a method that measures nothing.
NOTHING: Stat = {}


class Settled(dict[str, "Mean | Threshold | Grouped | Settled"]):
    """Statistics of the whole optimizer step by name; those of a combinator hold one of these per member."""

    def mean(self, name: str) -> Mean:
        """The :class:`Mean` of this name.

        Raises:
            KeyError: nothing of this name was measured.
            MethodError: it is not a mean.
        """
        return self._of(name, Mean)

    def threshold(self, name: str) -> Threshold:
        """What the :class:`Pool` of this name settled to; raises as :meth:`mean` does."""
        return self._of(name, Threshold)

    def grouped(self, name: str) -> Grouped:
        """The :class:`Grouped` of this name; raises as :meth:`mean` does."""
        return self._of(name, Grouped)

    def member(self, name: str) -> Settled:
        """The statistics of a member of a combinator; raises as :meth:`mean` does."""
        return self._of(name, Settled)

    def _of(self, name: str, kind: type[_Kind]) -> _Kind:
        value = self[name]
        if not isinstance(value, kind):
            raise MethodError(
                f"the statistic '{name}' is a {type(value).__name__}, not a {kind.__name__}. Read it as measured."
            )
        return value


_Kind = TypeVar("_Kind", Mean, Threshold, Grouped, Settled)


def merge(first: Stat, second: Stat) -> Stat:
    """The statistics of both parts, which have the same names and kinds."""
    return {name: summary.merge(second[name]) for name, summary in first.items()}  # type: ignore[arg-type]  # one kind


def settle(parts: Iterable[Stat], comm: Comm) -> Settled:
    """Merge the parts of this rank, reduce over ranks, and turn pools into thresholds.

    All means travel in one sum. The pools share three sums (six for float64) of at most 32 KB a pool; no value travels,
    unless a pool is small enough to be gathered after the first sum. Groups are gathered, a row per key.
    Every rank passes the same names (a rank without tokens passes the statistics of an empty batch).
    """
    return carried_out(settling(parts, isinstance(comm, LocalComm)), comm)


def settling(parts: Iterable[Stat], local: bool) -> Rounds[Settled]:
    """As :func:`settle`, in rounds; ``local`` where nothing travels."""
    stats = list(parts)
    summaries = [summary for part in stats for summary in part.values()]
    if summaries:  # everything that was measured on a device is copied from there at once
        read = iter((yield Read([tensor for summary in summaries for tensor in summary._tensors()])))
        stats = [{name: summary._read(read) for name, summary in part.items()} for part in stats]
    total: Stat = dict(sorted(functools.reduce(merge, stats).items())) if stats else NOTHING
    settled = Settled()
    means = {name: summary for name, summary in total.items() if isinstance(summary, Mean)}
    if means:
        scalars = [scalar for mean in means.values() for scalar in (mean.total, mean.count)]
        for name, row in zip(means, (yield Sum(torch.stack(scalars).view(-1, 2))), strict=True):
            settled[name] = Mean(row[0], row[1])
    for name, summary in total.items():
        if isinstance(summary, Grouped):
            settled[name] = yield from summary._gathered(local)
    # the values of pools stay on their rank, and the pools share each sum over ranks
    pools = {name: summary for name, summary in total.items() if isinstance(summary, Pool)}
    ranked = {name: (pool._joined(), pool._ranks) for name, pool in pools.items() if pool.rule != "budget"}
    selected = yield from selection(ranked, local)
    settled.update({name: pools[name]._settled(statistics) for name, statistics in selected.items()})
    for name in sorted(pools.keys() - ranked.keys()):
        settled[name] = Threshold(*(yield from beyond_budget(pools[name]._joined(), pools[name].level, local)))
    return settled
