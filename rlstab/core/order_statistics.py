"""Exact order statistics of values that stay on several ranks, by radix selection.

The bits of a float, with those of a negative one flipped, are an unsigned integer in the order of the floats. A
histogram of the 11 highest bits, summed over ranks, gives the bin of the wanted value; then the next 11 bits of
the values in that bin are counted, and so on. Only counts travel, for any number of values: three sums for
float32, six for float64, of at most 32 KB a set of values. Counts are float64, exact to 2^53.

If all ranks together have few values, they are gathered instead: three passes would cost more than they save.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstab.core.comm import Gather, Rounds, Sum
from rlstab.core.compare import chunks, indices

#: Bits of one pass: two histograms of 2^11 float64 counts are 32 KB.
DIGIT = 11
#: At most this many values of all ranks together are gathered: 32 KB in float64.
FEW = 1 << 12

#: From the number of values to the wanted ranks, from 1 to that number: at most two, and none of an empty set.
Ranks = Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class OrderStatistics:
    """The number of values over all ranks, and the order statistics in the order of the wanted ranks."""

    size: int
    values: Sequence[float]


def selection(sets: Mapping[str, tuple[Tensor, Ranks]], local: bool) -> Rounds[dict[str, OrderStatistics]]:
    """Order statistics of several sets of values, which share their sums over ranks.

    Args:
        sets: the ``(n,)`` values of each set on this rank, float32 or float64, on the CPU, perhaps empty; and
            which order statistics are wanted. The names are those of every rank. -0.0 equals 0.0, and NaN is above
            every number. Where some ranks hold float32 and others float64, all go on in float64, after one discarded
            reduction.
        local: nothing travels.
    """
    searches = {name: _Search(values, ranks, local) for name, (values, ranks) in sorted(sets.items())}
    while running := [search for search in searches.values() if search.running]:
        histograms = [search.histograms() for search in running]
        total = yield Sum(torch.cat(histograms))
        for search, counts in zip(running, total.split([counts.numel() for counts in histograms]), strict=True):
            search.narrow(counts)
    selected = {}
    for name, search in searches.items():
        selected[name] = yield from search.selected()
    return selected


class _Search:
    """One set of values: the keys that are still candidates, by their first bits."""

    def __init__(self, values: Tensor, ranks: Ranks, local: bool) -> None:
        self.ranks, self.local = ranks, local
        self.size = values.numel() if local else None  # over all ranks
        self.wanted: list[tuple[int, int]] | None = None  # first bits, and rank among the values with these
        self._start(values)

    def _start(self, values: Tensor) -> None:
        self.values, self.wide = values, values.dtype == torch.float64
        self.left = 64 if self.wide else 32  # bits that are still unknown
        self.groups = {} if self.few else {0: [_keys(piece) for (piece,) in chunks(values)]}

    @property
    def few(self) -> bool:
        """Whether there are few enough values to gather them."""
        return self.size is not None and self.size <= FEW

    @property
    def running(self) -> bool:
        """Whether a histogram is needed: bits are unknown, and some order statistic is wanted."""
        return self.left > 0 and not self.few and self.wanted != []

    def selected(self) -> Rounds[OrderStatistics]:
        """The order statistics, once no histogram is needed; gathers the values if they are few."""
        if self.few and self.size:
            pool = yield Gather(self.values.double())
            values = [float(pool.kthvalue(rank).values) + 0.0 for rank in self.ranks(self.size)]
        else:
            values = [_value(key, self.wide) for key, _ in self.wanted or ()]
        return OrderStatistics(self.size or 0, values)

    def histograms(self) -> Tensor:
        """A histogram of this rank for each group; before the first sum also the number of float64 values."""
        counts, size = list[Tensor](), 1 << self._digit
        for _, pieces in sorted(self.groups.items()):
            histograms = [torch.bincount(self._digits(keys), minlength=size) for keys in pieces]
            counts.append(torch.stack(histograms).sum(0).double())
        if self.wanted is None:
            counts.append(torch.tensor([float(self.values.numel() * self.wide)], dtype=torch.float64))
        return torch.cat(counts)

    def narrow(self, counts: Tensor) -> None:
        """Take the counts of all ranks; the first time, they also say how many values there are."""
        if self.wanted is None:
            counts, doubles = counts[:-1], int(counts[-1])
            self.size = int(counts.sum())
            if doubles and not (self.wide or self.few):
                self._start(self.values.double())
            if doubles in (0, self.size) and not self.few:  # else a histogram mixed keys of float32 and float64
                self.wanted = [(0, rank) for rank in self.ranks(self.size)]
        if self.wanted is not None:
            self._descend(counts, self.wanted)

    def _descend(self, counts: Tensor, order_statistics: Sequence[tuple[int, int]]) -> None:
        """Lengthen the first bits of each order statistic by one digit, and keep only the keys that begin with them."""
        bits = self._digit
        cumulative = dict(zip(sorted(self.groups), counts.view(len(self.groups), -1).cumsum(1), strict=True))
        narrowed: list[tuple[int, int]] = []
        groups: dict[int, list[Tensor]] = {}
        for prefix, rank in order_statistics:
            digit = int(torch.searchsorted(cumulative[prefix], float(rank)))
            below = int(cumulative[prefix][digit - 1]) if digit else 0
            longer = prefix << bits | digit
            narrowed.append((longer, rank - below))
            if longer not in groups and self.left > bits:
                # torch compares integers in place, and selects by index, in a fraction of the time
                groups[longer] = [
                    keys.index_select(0, indices(self._digits(keys).eq_(digit).bool())) for keys in self.groups[prefix]
                ]
        self.wanted, self.groups = narrowed, groups
        self.left -= bits
        if self.local and self.left:  # nothing travels: the remaining keys, of one sign, are sorted at once
            keys = [torch.cat(groups[prefix]).kthvalue(rank).values for prefix, rank in narrowed]
            self.wanted, self.left = [(int(key) % (1 << 32 + 32 * self.wide), 1) for key in keys], 0

    @property
    def _digit(self) -> int:
        return min(DIGIT, self.left)

    def _digits(self, keys: Tensor) -> Tensor:
        return (keys >> (self.left - self._digit)).bitwise_and_((1 << self._digit) - 1)


def _keys(values: Tensor) -> Tensor:
    """``(n,)`` int32 or int64 whose bits, read as an unsigned number, are in the order of the values."""
    kind = torch.int64 if values.dtype == torch.float64 else torch.int32
    bits = values.view(kind)
    flip = (bits >> (torch.iinfo(kind).bits - 1)).bitwise_or_(torch.iinfo(kind).min)
    keys = flip.bitwise_xor_(bits)
    if math.isnan(values.sum()):  # cheaper than a check of each; infinities of both signs get here too
        keys.masked_fill_(values.isnan(), -1)  # of either sign
    return keys


def _value(key: int, wide: bool) -> float:
    """The number of a key; the two zeros are neighbours, so one stands for both."""
    integer, number, sign = ("<Q", "<d", 1 << 63) if wide else ("<I", "<f", 1 << 31)
    bits = key ^ (sign if key & sign else 2 * sign - 1)
    value: float = struct.unpack(number, struct.pack(integer, bits))[0]
    return value + 0.0
