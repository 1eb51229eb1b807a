"""The lines of a log of any trainer or tracker, under its own names, and the run that they make under rlstab's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlstab.bins import EMPTY, MOST_ROLLOUTS, WIDTH, Curve, Run, rounded
from rlstab.console import counted, ranges
from rlstab.logs.metric_aliases import BESIDE, SCORE, Line, known, preference, translated
from rlstab.safe_read import as_number, gaps

#: Share of the steps after which the log may stop recording the cost.
ENOUGH = 0.9


class Rows(dict[int, dict[str, float]]):
    """Values by step and name, added in the order of the log; values that were not finite are NaN.

    A run that is resumed from an older checkpoint logs steps a second time. The later line counts, and what the first
    branch logged from there on is dropped.

    Args:
        rows: the first lines.
        unit: of the steps, ``rollout`` or ``step``.
    """

    def __init__(self, rows: Mapping[int, dict[str, float]] | None = None, unit: str = "step") -> None:
        super().__init__(rows or {})
        self.unit, self.last = unit, 0
        self.abandoned: set[int] = set()
        self._lines: dict[int, Line] = {}  # a run is looked at after each line, and each line is translated once

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the values of a step: numbers, also as text. None, which some writers put for NaN, is NaN."""
        numbers = {name: math.nan if value is None else as_number(value) for name, value in values.items()}
        # a late evaluation of an older step repeats none of the known metrics
        if step < self.last and known(numbers.keys() & self.get(step, {}).keys()):
            branch = {later for later in self if later >= step}
            self.abandoned |= branch
            for later in branch:
                del self[later]
            self.last = step
        self.setdefault(step, {}).update((name, number) for name, number in numbers.items() if number is not None)
        self._lines.pop(step, None)
        self.last = max(self.last, step)

    def run(
        self,
        path: str = "",
        writer: str = "",
        remarks: Sequence[str] = (),
        *,
        planned: int | None = None,
        costs: bool = False,
    ) -> Run:
        """The run so far. If another trainer counts steps from 0, they are counted from 1.

        Args:
            path: see :class:`rlstab.bins.Run`.
            writer: the same.
            remarks: what could not be read.
            planned: number of its last step, if the log gives it.
            costs: whether to add up what its steps took, which a run that is watched does without.
        """
        # rlstab's record of rollout 0 is an evaluation; another trainer has trained there
        shift = int(self.unit == "step" and known(self.get(0, ())))
        lines: dict[int, Line] = {}
        for step in sorted(step for step in self if 0 <= step < MOST_ROLLOUTS):
            if step not in self._lines:
                self._lines[step] = translated(self[step])
            lines[step + shift] = self._lines[step]
        points: dict[str, dict[int, float]] = {}
        logged_scores: dict[str, dict[int, float]] = {}
        names: dict[str, str] = {}
        for step, line in lines.items():
            for metric, (name, value) in line.metrics.items() if step else ():
                points.setdefault(metric, {})[step] = value
                names.setdefault(metric, name)
            for name, value in line.scores.items():
                logged_scores.setdefault(name, {})[step] = value
        curves = {metric: _finite(values) for metric, values in points.items()}
        evaluations = EMPTY
        if logged_scores:  # of several data sets, the one with the most scores counts
            scores = {name: _finite(values) for name, values in logged_scores.items()}
            name = min(scores, key=lambda score: (-len(scores[score][0]), preference(score)))
            evaluations = steps, values = scores[name]
            curves[SCORE], names[SCORE] = (steps[steps > 0], values[steps > 0]), name
            points[SCORE] = logged_scores[name]
        metrics = {metric: curve for metric, curve in curves.items() if len(curve[0])}
        damaged = _damaged(metrics, points)
        last = max((int(steps[-1]) for steps, _ in metrics.values()), default=0)
        return Run(
            path=path,
            writer=writer,
            unit=self.unit,
            metrics=metrics,
            names={metric: names[metric] for metric in metrics},
            evaluations=[  # with those at step 0, which no curve has
                {"rollout": min(step, last), SCORE: rounded(score)}
                for step, score in zip(*map(np.ndarray.tolist, evaluations), strict=True)
            ],
            spent=_spent(lines, last) if costs else {},
            ended=None if planned is None else max(self) + shift >= planned,
            not_finite=tuple(damaged),
            remarks=(*remarks, *self._remarks(metrics, damaged, shift, len(self) - len(lines))),
        )

    @property
    def trained(self) -> bool:
        """Whether the run so far has a metric which shows that something was trained."""
        return any(line.metrics.keys() - BESIDE for line in self._lines.values())

    def _remarks(
        self, metrics: Mapping[str, Curve], damaged: Mapping[str, list[int]], shift: int, beyond: int
    ) -> Iterator[str]:
        """What was dropped or changed, and what is missing.

        Args:
            metrics: finite values by rlstab's name.
            damaged: of :func:`_damaged`.
            shift: by which steps were renumbered.
            beyond: number of lines whose step is out of range.
        """
        if self.abandoned:
            first = f"the run was resumed from an earlier step, and logs step {min(self.abandoned)} again"
            yield f"{first}: left out what it had logged of steps {ranges(self.abandoned)} before"
        if shift:
            yield "its steps begin at 0 and are counted from 1 here"
        if beyond:
            yield f"left out {counted(beyond, self.unit)} below 0 or above {MOST_ROLLOUTS:,}"
        if missing := gaps({step for steps, _ in metrics.values() for step in steps.tolist()}):
            yield f"no line for {self.unit} {missing}"
        texts = [
            f"{name} in {counted(len(steps), 'line')} from {self.unit} {steps[0]} on" for name, steps in damaged.items()
        ]
        if texts:
            yield f"left out values that are NaN, Inf or null: {', '.join(texts)}"


def _finite(points: Mapping[int, float]) -> Curve:
    steps, values = np.fromiter(points, np.int64, len(points)), np.fromiter(points.values(), np.float64, len(points))
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def _damaged(metrics: Mapping[str, Curve], points: Mapping[str, Mapping[int, float]]) -> dict[str, list[int]]:
    """By metric, the steps at which a value is NaN or infinite, which is left out.

    A norm has a sign of its own, and a metric may be logged now and then, and be null in most lines.

    Args:
        metrics: finite values by rlstab's name.
        points: all values, by the same name and step.
    """
    damaged = {}
    for name, values in points.items():
        steps = [step for step in values if not math.isfinite(values[step])]
        finite, _ = metrics.get(name, EMPTY)
        sparse = 0 < len(finite) < len(steps) and int(finite[-1]) > steps[0]
        if steps and name != "gradient/norm" and not sparse:
            damaged[name] = steps
    return damaged


def _spent(lines: Mapping[int, Line], last: int) -> dict[str, Curve]:
    """The cost up to the end of each bin; each line of a log stands for the steps since the previous one."""
    ends = np.unique(np.minimum(np.arange(WIDTH, last + WIDTH, WIDTH), last)).astype(np.int64)
    curves: dict[str, Curve] = {}
    for unit in ("seconds", "tokens"):
        steps, totals = [0], [0.0]
        for step, line in lines.items():
            total = line.spent.get(f"{unit} so far")
            if total is None and (per_step := line.spent.get(unit)) is not None:
                total = totals[-1] + per_step * (step - steps[-1])
            if total is not None and math.isfinite(total) and total >= totals[-1]:
                steps.append(step)
                totals.append(total)
        if steps[-1] >= ENOUGH * last > 0:
            steps, totals = [*steps, last], [*totals, totals[-1] * max(1.0, last / steps[-1])]
            curves[unit] = ends, np.array([rounded(float(value)) for value in np.interp(ends, steps, totals)])
    return curves
