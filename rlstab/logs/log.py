"""The log of one run of any trainer or tracker, by step and under its own names, and its curves under rlstab's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlstab.bins import MOST_ROLLOUTS, Curve
from rlstab.console import counted, ranges
from rlstab.logs.metric_aliases import known, our_metrics
from rlstab.safe_read import gaps


class Rows(dict[int, dict[str, float]]):
    """Values by step and name, added in the order of the log; values that were not finite are NaN.

    A run that is resumed from an older checkpoint logs steps a second time. The later line counts, and what the first
    branch logged from there on is dropped.

    Attributes:
        ours: steps as :func:`our_metrics` gives them, cached, because a run is judged after each line.
    """

    def __init__(self) -> None:
        self.ours: dict[int, dict[str, tuple[str, float]]] = {}
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
                self.ours.pop(later, None)
            self.last = step
        self.setdefault(step, {}).update(values)
        self.ours.pop(step, None)
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


@dataclass(frozen=True)
class LoggedCurves:
    """The curves of a log under rlstab's names.

    Attributes:
        metrics: by rlstab's name, steps (from 1) and finite values, each as often as the log has it.
        names: the names in the log, by rlstab's name.
        shift: number added to the steps of the log.
        remarks: what was changed or is missing.
    """

    metrics: dict[str, Curve]
    names: dict[str, str]
    shift: int
    remarks: tuple[str, ...]


def curves_of(rows: Mapping[int, Mapping[str, float]], unit: str = "step") -> LoggedCurves:
    """The known metrics. If another trainer counts steps from 0, they are counted from 1."""
    kept = rows.ours if isinstance(rows, Rows) else {}
    points: dict[str, list[tuple[int, float]]] = {}
    names: dict[str, str] = {}
    # rlstab's record of rollout 0 is an evaluation; another trainer that logs a metric of training there has trained
    shift = int(unit == "step" and known(rows.get(0, ())))
    steps = sorted(step for step in rows if 0 <= step < MOST_ROLLOUTS)
    for step in steps if shift else filter(None, steps):
        metrics = kept[step] if step in kept else kept.setdefault(step, our_metrics(rows[step]))
        for ours, (name, value) in metrics.items():
            # of several held-out data sets, one is used
            if math.isfinite(value) and not (names.setdefault(ours, name) != name and ours == "eval/mean"):
                points.setdefault(ours, []).append((step + shift, value))
    curves = {
        ours: (np.array([step for step, _ in pairs], np.int64), np.array([value for _, value in pairs], np.float64))
        for ours, pairs in points.items()
    }
    remarks: tuple[str, ...] = ()
    if shift:
        remarks += ("its steps begin at 0 and are counted from 1 here",)
    if beyond := len(rows) - len(steps):
        remarks += (f"left out {counted(beyond, unit)} below 0 or above {MOST_ROLLOUTS:,}",)
    if missing := gaps({step for pairs in points.values() for step, _ in pairs}):
        remarks += (f"no line for {unit} {missing}",)
    return LoggedCurves(curves, names, shift, remarks)
