"""The log of one run of any trainer or tracker, by step and under its own names, and its curves under rlstab's."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlstab.bins import EMPTY, MOST_ROLLOUTS, Curve
from rlstab.console import counted, ranges
from rlstab.logs.metric_aliases import known, our_metrics
from rlstab.safe_read import gaps


class Rows(dict[int, dict[str, float]]):
    """Values by step and name, added in the order of the log; values that were not finite are NaN.

    A run that is resumed from an older checkpoint logs steps a second time. The later line counts, and what the first
    branch logged from there on is dropped.

    Attributes:
        read: the lines that :func:`curves_of` has read; a run is looked at after each line.
    """

    def __init__(self) -> None:
        self.read = _Read()
        self.last = 0
        self.abandoned: set[int] = set()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step."""
        # a late evaluation of an older step repeats none of the known metrics
        if step < self.last and known(values.keys() & self.get(step, {}).keys()):
            branch = {later for later in self if later >= step}
            self.abandoned |= branch
            for later in branch:
                del self[later]
            self.last = step
        self.setdefault(step, {}).update(values)
        if step <= self.read.last:
            self.read = _Read()
        self.last = max(self.last, step)

    @property
    def remarks(self) -> tuple[str, ...]:
        """A sentence about the steps that were dropped, if any."""
        if not self.abandoned:
            return ()
        first = f"the run was resumed from an earlier step, and logs step {min(self.abandoned)} again"
        return (f"{first}: left out what it had logged of steps {ranges(self.abandoned)} before",)


@dataclass(frozen=True)
class Log:
    """One run as it was logged.

    Attributes:
        title: a path, or the name of the run in a table.
        writer: the trainer that wrote it, such as ``TRL``.
        rows: values by step and by the names of the log.
        remarks: what was left out of it.
        unit: of its steps, ``rollout`` or ``step``.
        planned: number of its last step, if the log gives it.
    """

    title: str
    writer: str
    rows: Rows
    remarks: tuple[str, ...] = ()
    unit: str = "step"
    planned: int | None = None


class _Read:
    """Lines of a log in their order, under rlstab's names."""

    def __init__(self) -> None:
        self.last, self.lines, self.shift = -1, 0, 0
        self.points: dict[str, tuple[array[int], array[float]]] = {}
        self.names: dict[str, str] = {}
        self.not_finite: dict[str, list[int]] = {}

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Read the line of a step."""
        for ours, (name, value) in our_metrics(row).items():
            if not math.isfinite(value):
                self.not_finite.setdefault(ours, []).append(step + self.shift)
            # of several held-out data sets, one is used
            elif self.names.setdefault(ours, name) == name or ours != "eval/mean":
                steps, values = self.points.setdefault(ours, (array("q"), array("d")))
                steps.append(step + self.shift)
                values.append(value)


@dataclass(frozen=True)
class LoggedCurves:
    """The curves of a log under rlstab's names.

    Attributes:
        metrics: by rlstab's name, steps (from 1) and finite values, each as often as the log has it.
        names: the names in the log, by rlstab's name.
        shift: number added to the steps of the log.
        not_finite: by rlstab's name, the steps at which a value is NaN or infinite, which is left out.
        beyond: lines whose steps are left out.
        unit: what a step is.
    """

    metrics: dict[str, Curve]
    names: dict[str, str]
    shift: int
    not_finite: Mapping[str, list[int]]
    beyond: int
    unit: str

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was changed or is missing."""
        remarks: list[str] = []
        if self.shift:
            remarks.append("its steps begin at 0 and are counted from 1 here")
        if self.beyond:
            remarks.append(f"left out {counted(self.beyond, self.unit)} below 0 or above {MOST_ROLLOUTS:,}")
        if missing := gaps({step for steps, _ in self.metrics.values() for step in steps.tolist()}):
            remarks.append(f"no line for {self.unit} {missing}")
        told = [
            f"{ours} in {counted(len(steps), 'line')} from {self.unit} {steps[0]} on"
            for ours, steps in self.not_finite.items()
            if ours != "gradient/norm" and not self._sparse(ours, steps)  # a norm has a sign of its own
        ]
        return (*remarks, *([f"left out values that are NaN, Inf or null: {', '.join(told)}"] if told else []))

    def _sparse(self, ours: str, steps: list[int]) -> bool:
        """Whether a metric is logged now and then, and null in most lines."""
        finite, _ = self.metrics.get(ours, EMPTY)
        return len(finite) < len(steps) and len(finite) > 0 and int(finite[-1]) > steps[0]


def curves_of(rows: Mapping[int, Mapping[str, float]], unit: str = "step") -> LoggedCurves:
    """The known metrics. If another trainer counts steps from 0, they are counted from 1."""
    read = rows.read if isinstance(rows, Rows) else _Read()
    if read.last < 0:  # rlstab's record of rollout 0 is an evaluation; another trainer has trained there
        read.shift = int(unit == "step" and known(rows.get(0, ())))
    for step in sorted(step for step in rows if read.last < step < MOST_ROLLOUTS):
        if step or read.shift:
            read.add(step, rows[step])
        read.last, read.lines = step, read.lines + 1
    metrics = {ours: (np.array(steps), np.array(values)) for ours, (steps, values) in read.points.items()}
    return LoggedCurves(metrics, dict(read.names), read.shift, read.not_finite, len(rows) - read.lines, unit)
