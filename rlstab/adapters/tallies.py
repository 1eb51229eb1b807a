"""Metrics that are averaged over everything that was counted, not over the means of micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rlstab.core.stats import Mean

#: By name, a sum and a count.
Sums: TypeAlias = dict[str, tuple[float, float]]


class Tallies:
    """Means over micro-batches, optimizer steps and ranks: a sum and a count each, left on the device until asked.

    Args:
        gather: the sums of every rank, from those of this one.
    """

    def __init__(self, gather: Callable[[Sums], Sequence[Sums]]) -> None:
        self.gather = gather
        self.means: dict[str, Mean] = {}

    def add(self, report: Mapping[str, Mean]) -> None:
        """Merge a report."""
        for name, one in report.items():
            self.means[name] = self.means[name].merge(one) if name in self.means else one

    def collect(self) -> dict[str, float]:
        """The means over all ranks, without what nothing was counted for; then everything begins anew.

        Every rank calls it.
        """
        own = {name: (float(one.total), float(one.count)) for name, one in sorted(self.means.items())}
        self.means = {}
        sums: Sums = {}
        for rank in self.gather(own):
            for name, (total, count) in rank.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + count
        return {name: total / count for name, (total, count) in sums.items() if count}
