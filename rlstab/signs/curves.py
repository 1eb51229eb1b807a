"""The curves of a run as the detectors read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlstab.bins import EMPTY, Run

#: Names of rewards for the format, whatever the task; the other parts of a reward are about the task.
FORMS = re.compile(
    "format|length|overlong|penal|punish|short|brev|concis|xml|tag|style|repetition|language|think|steps", re.IGNORECASE
)
#: Metrics ``reward/...`` that are not one of several rewards.
TOTALS = {f"reward/{name}" for name in ("mean", "std", "min", "max", "true", "shaped_mean", "zero_std_groups")}
#: Any of several rewards, as a metric that a detector reads.
PARTS = "reward/NAME"
#: Lines over which an end is averaged, at least; one line is an outlier, two may be.
FEW = 3
#: Lines of a smooth value.
NEIGHBOURS = 5


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric of a run.

    Attributes:
        name: its name.
        steps, values: as logged; finite.
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @cached_property
    def start(self) -> float:
        """Its mean over the first tenth of the lines."""
        return float(self.values[: self._tenth].mean()) if len(self.values) else 0.0

    @cached_property
    def end(self) -> float:
        """Its mean over the last tenth of the lines."""
        return float(self.values[-self._tenth :].mean()) if len(self.values) else 0.0

    @property
    def _tenth(self) -> int:
        return max(FEW, len(self.values) // 10)

    @cached_property
    def smooth(self) -> NDArray[np.float64]:
        """Its means over a few neighbours."""
        sums = np.convolve(self.values, np.ones(NEIGHBOURS), "same")
        return np.asarray(sums / np.convolve(np.ones(len(self.values)), np.ones(NEIGHBOURS), "same"))

    def begins(self, level: float, rises: bool) -> int:
        """The step from which the values are beyond a level for good.

        It begins the tail of the curve whose excess over the level has the largest sum: a single value on the other
        side does not end a state, and a single one before does not begin it.
        """
        excess = self.values - level if rises else level - self.values
        return int(self.steps[len(excess) - 1 - int(np.cumsum(excess[::-1]).argmax())])

    def where(self, chosen: NDArray[np.bool_]) -> Metric:
        """Some of its lines."""
        return Metric(self.name, self.steps[chosen], self.values[chosen])

    def at(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Its smooth values at other steps, interpolated."""
        return np.asarray(np.interp(steps, self.steps, self.smooth))


class Curves:
    """The metrics of a run, each read once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._read: dict[str, Metric] = {}

    def __getitem__(self, name: str) -> Metric:
        if name not in self._read:
            steps, values = self.run.metrics.get(name, EMPTY)
            if name.startswith("eval/") and not len(steps):
                records = [record for record in self.run.evaluations if record["rollout"] and name in record]
                steps = np.array([record["rollout"] for record in records], np.int64)
                values = np.array([record[name] for record in records], np.float64)
            finite = np.isfinite(values)
            self._read[name] = Metric(name, steps[finite], values[finite])
        return self._read[name]

    def named(self, name: str) -> Iterator[Metric]:
        """The metric of a name; each of several rewards for :data:`PARTS`."""
        yield from self.parts if name == PARTS else [self[name]]

    @property
    def parts(self) -> list[Metric]:
        """Several rewards of a run, by name."""
        names = (name for name in self.run.metrics if re.fullmatch("reward/[^/]+", name) and name not in TOTALS)
        return [self[name] for name in sorted(names)]

    @property
    def tasks(self) -> list[Metric]:
        """The rewards for the task; the whole reward if none is separate."""
        return [part for part in self.parts if not FORMS.search(part.name)] or [self["reward/mean"]]
