"""Means of metrics over micro-batches, optimizer steps and ranks."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from rlstab.core.devices import on_cpu
from rlstab.core.stats import Mean

#: A sum and a count by name, as they travel between ranks.
Sums: TypeAlias = dict[str, tuple[float, float]]


class RunningMeans(dict[str, Mean]):
    """Means of one rank by name. They stay on the device until :meth:`take`, so that nothing waits for kernels."""

    def add(self, report: Mapping[str, Mean]) -> None:
        """Merge a report, such as that of a loss."""
        for name, mean in report.items():
            self[name] = self[name].merge(mean) if name in self else mean

    def take(self) -> Sums:
        """Sums and counts since the last call; those of a device are copied together, since each read waits for it."""
        numbers = on_cpu([number for mean in self.values() for number in (mean.total, mean.count)])
        values = list(map(float, numbers))
        sums = dict(zip(self, zip(values[::2], values[1::2], strict=True), strict=True))
        self.clear()
        return sums


def means_over_ranks(ranks: Iterable[Sums]) -> dict[str, float]:
    """The mean of each name over all ranks, in the order of the names, without names that counted nothing.

    Args:
        ranks: what each rank's :meth:`RunningMeans.take` returned, in rank order.
    """
    merged: Sums = {}
    for sums in ranks:
        for name, (total, count) in sums.items():
            before = merged.get(name, (0.0, 0.0))
            merged[name] = before[0] + total, before[1] + count
    return {name: total / count for name, (total, count) in sorted(merged.items()) if count}
