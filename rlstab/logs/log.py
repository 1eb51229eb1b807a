"""The log of one run of any trainer or tracker, by step and under its own names, and its curves under rlstab's."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from rlstab.bins import EMPTY, MOST_ROLLOUTS, Curve, Sign
from rlstab.console import counted, ranges
from rlstab.logs.metric_aliases import SCORE, known, our_metrics, preference, scores_in
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
    rows: Mapping[int, Mapping[str, float]]
    remarks: tuple[str, ...] = ()
    unit: str = "step"
    planned: int | None = None


#: Steps and values, in the order of the log.
_Points: TypeAlias = "tuple[array[int], array[float]]"


class _Read:
    """Lines of a log in their order, under rlstab's names."""

    def __init__(self) -> None:
        self.last, self.lines, self.shift = -1, 0, 0
        self.points: dict[str, _Points] = {}
        self.scores: dict[str, _Points] = {}
        self.names: dict[str, str] = {}

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Read the line of a step."""
        for ours, (name, value) in our_metrics(row).items() if step else ():
            self.names.setdefault(ours, name)
            _add(self.points, ours, step, value)
        for name, value in scores_in(row).items():
            _add(self.scores, name, step, value)


def _add(points: dict[str, _Points], name: str, step: int, value: float) -> None:
    steps, values = points.setdefault(name, (array("q"), array("d")))
    steps.append(step)
    values.append(value)


def _curves(points: Mapping[str, _Points]) -> dict[str, tuple[Curve, list[int]]]:
    """By name, the finite values, and the steps of the others."""
    found = {}
    for name, (steps, values) in points.items():
        where, numbers = np.array(steps), np.array(values)
        finite = np.isfinite(numbers)
        found[name] = (where[finite], numbers[finite]), where[~finite].tolist()
    return found


@dataclass(frozen=True, eq=False)
class LoggedCurves:
    """The curves of a log under rlstab's names, as the detectors of signs read them.

    Attributes:
        metrics: by rlstab's name, steps (from 1) and finite values, each as often as the log has it.
        names: the names in the log, by rlstab's name.
        scores: the held-out scores, also those of step 0. Of several data sets, the one with the most scores counts.
        shift: number added to the steps of the log.
        not_finite: by rlstab's name, the steps at which a value is NaN or infinite, which is left out.
        beyond: lines whose steps are left out.
        unit: of its steps, ``rollout`` or ``step``.
        largest, evaluations, bin_width, judged: of a run of rlstab; see :class:`rlstab.report.runs.RunRecord`.
    """

    metrics: dict[str, Curve]
    names: dict[str, str]
    scores: Curve
    shift: int
    not_finite: Mapping[str, list[int]]
    beyond: int
    unit: str
    largest: Mapping[str, Curve] = field(default_factory=dict)
    evaluations: Sequence[Mapping[str, float]] = ()
    bin_width: int = 1
    judged: Mapping[str, Sign] = field(default_factory=dict)

    @property
    def rollouts(self) -> int:
        """The last step; 0 without any."""
        return max((int(steps[-1]) for steps, _ in self.metrics.values() if len(steps)), default=0)

    @property
    def changes(self) -> tuple[str, ...]:
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
        read.add(step + read.shift, rows[step])
        read.last, read.lines = step, read.lines + 1
    found, held_out, names, scores = _curves(read.points), _curves(read.scores), dict(read.names), EMPTY
    if held_out:
        name = min(held_out, key=lambda score: (-len(held_out[score][0][0]), preference(score)))
        scores, others = held_out[name]
        trained = scores[0] > 0
        found[SCORE], names[SCORE] = ((scores[0][trained], scores[1][trained]), others), name
    metrics = {ours: curve for ours, (curve, _) in found.items() if len(curve[0])}
    names = {ours: names[ours] for ours in metrics}
    not_finite = {ours: steps for ours, (_, steps) in found.items() if steps}
    return LoggedCurves(metrics, names, scores, read.shift, not_finite, len(rows) - read.lines, unit)
