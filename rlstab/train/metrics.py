"""Metrics of one rollout: summaries that merge over micro-batches, optimizer steps and ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from accelerate.utils import gather_object
from torch import Tensor

from rlstab.core.stats import Mean

#: A scalar; a tensor stays on its device until the metrics are collected, so that nothing waits for it.
Number: TypeAlias = float | Tensor


@dataclass
class Metrics:
    """Collects means, sums, largest values and counts by name, and seconds by phase."""

    means: dict[str, tuple[Number, Number]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    largest: dict[str, Number] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, total: Number, count: Number) -> None:
        """Add to a mean."""
        before = self.means.get(name, (0.0, 0.0))
        self.means[name] = before[0] + total, before[1] + count

    def report(self, report: Mapping[str, Mean]) -> None:
        """Add the report of a loss."""
        for name, one in report.items():
            self.mean(name, one.total, one.count)

    def add(self, name: str, value: float) -> None:
        """Add to a sum over parts and ranks."""
        self.sums[name] = self.sums.get(name, 0.0) + value

    def count(self, name: str) -> None:
        """Count an event that every rank sees."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def highest(self, name: str, value: Number) -> None:
        """Keep the largest value."""
        before = torch.as_tensor(self.largest.get(name, value), dtype=torch.float64)
        self.largest[name] = torch.maximum(before, torch.as_tensor(value, dtype=torch.float64))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, in seconds of wall time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """The metrics over all ranks; means nothing was counted for are left out. Every rank calls it."""
        means = {name: (float(total), float(count)) for name, (total, count) in self.means.items()}
        largest = {name: float(value) for name, value in self.largest.items()}
        ranks = gather_object([(means, self.sums, largest)])
        whole = Metrics()
        for means, sums, largest in ranks:
            for name, (total, count) in means.items():
                whole.mean(name, total, count)
            for name, value in sums.items():
                whole.add(name, value)
            for name, value in largest.items():
                whole.highest(name, value)
        values = {name: float(total) / float(count) for name, (total, count) in sorted(whole.means.items()) if count}
        return {
            **values,
            **whole.sums,
            **{name: float(value) for name, value in whole.largest.items()},
            **self.counts,
            **{f"seconds/{name}": value for name, value in self.seconds.items()},
        }
