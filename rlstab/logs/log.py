"""The lines of a log of any trainer or tracker, under its own names, and the run that they make under rlstab's."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from rlstab.bins import EMPTY, MOST_ROLLOUTS, WIDTH, Curve, Run, rounded
from rlstab.console import counted, ranges
from rlstab.logs.metric_aliases import (
    SCORE,
    SPENT,
    TOKENS_SO_FAR,
    known,
    our_metrics,
    preference,
    scores_in,
    spent,
)
from rlstab.safe_read import gaps

#: Share of the steps after which the log may stop recording the cost.
ENOUGH = 0.9
#: Steps and values, in the order of the log.
_Points: TypeAlias = "tuple[array[int], array[float]]"


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
        self._forget()

    def _forget(self) -> None:
        """Read every line again; a run is looked at after each line, and only new ones are read."""
        self._read, self._lines, self._shift = -1, 0, 0
        self._points: dict[str, _Points] = {}
        self._scores: dict[str, _Points] = {}
        self._names: dict[str, str] = {}

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
        if step <= self._read:
            self._forget()
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
        if self._read < 0:  # rlstab's record of rollout 0 is an evaluation; another trainer has trained there
            self._shift = int(self.unit == "step" and known(self.get(0, ())))
        for step in sorted(step for step in self if self._read < step < MOST_ROLLOUTS):
            self._add(step + self._shift, self[step])
            self._read, self._lines = step, self._lines + 1
        found, held_out, names, scores = _curves(self._points), _curves(self._scores), dict(self._names), EMPTY
        if held_out:  # of several data sets, the one with the most scores counts
            name = min(held_out, key=lambda score: (-len(held_out[score][0][0]), preference(score)))
            scores, others = held_out[name]
            trained = scores[0] > 0
            found[SCORE], names[SCORE] = ((scores[0][trained], scores[1][trained]), others), name
        metrics = {ours: curve for ours, (curve, _) in found.items() if len(curve[0])}
        damaged = _damaged(metrics, {ours: steps for ours, (_, steps) in found.items()})
        last = max((int(steps[-1]) for steps, _ in metrics.values()), default=0)
        return Run(
            path=path,
            writer=writer,
            unit=self.unit,
            metrics=metrics,
            names={ours: names[ours] for ours in metrics},
            evaluations=[  # with those at step 0, which no curve has
                {"rollout": min(step, last), SCORE: rounded(score)}
                for step, score in zip(*map(np.ndarray.tolist, scores), strict=True)
            ],
            spent=self._spent(last) if costs else {},
            ended=None if planned is None else max(self) + self._shift >= planned,
            not_finite=tuple(damaged),
            remarks=(*remarks, *self._remarks(metrics, damaged)),
        )

    def _add(self, step: int, row: Mapping[str, float]) -> None:
        metrics, scores = our_metrics(row) if step else {}, scores_in(row)
        for ours, (name, value) in metrics.items():
            self._names.setdefault(ours, name)
            _append(self._points, ours, step, value)
        for name, value in scores.items():
            _append(self._scores, name, step, value)

    def _remarks(self, metrics: Mapping[str, Curve], damaged: Mapping[str, list[int]]) -> Iterator[str]:
        """What was dropped or changed, and what is missing."""
        if self.abandoned:
            first = f"the run was resumed from an earlier step, and logs step {min(self.abandoned)} again"
            yield f"{first}: left out what it had logged of steps {ranges(self.abandoned)} before"
        if self._shift:
            yield "its steps begin at 0 and are counted from 1 here"
        if beyond := len(self) - self._lines:
            yield f"left out {counted(beyond, self.unit)} below 0 or above {MOST_ROLLOUTS:,}"
        if missing := gaps({step for steps, _ in metrics.values() for step in steps.tolist()}):
            yield f"no line for {self.unit} {missing}"
        lines = [f"{ours} in {counted(len(at), 'line')} from {self.unit} {at[0]} on" for ours, at in damaged.items()]
        if lines:
            yield f"left out values that are NaN, Inf or null: {', '.join(lines)}"

    def _spent(self, last: int) -> dict[str, Curve]:
        """The cost up to the end of each bin; each line of a log stands for the steps since the previous one."""
        ends = np.unique(np.minimum(np.arange(WIDTH, last + WIDTH, WIDTH), last)).astype(np.int64)
        curves: dict[str, Curve] = {}
        for unit, names in SPENT.items():
            steps, totals = [0], [0.0]
            for step, row in sorted(self.items()):
                total = spent(row, TOKENS_SO_FAR) if unit == "tokens" else None
                if total is None and (each := spent(row, names)) is not None:
                    total = totals[-1] + each * (step + self._shift - steps[-1])
                if total is not None and math.isfinite(total) and total >= totals[-1]:
                    steps.append(step + self._shift)
                    totals.append(total)
            if steps[-1] >= ENOUGH * last > 0:
                steps, totals = [*steps, last], [*totals, totals[-1] * max(1.0, last / steps[-1])]
                curves[unit] = ends, np.array([rounded(float(value)) for value in np.interp(ends, steps, totals)])
        return curves


def _append(points: dict[str, _Points], name: str, step: int, value: float) -> None:
    steps, values = points.setdefault(name, (array("q"), array("d")))
    steps.append(step)
    values.append(value)


def _damaged(metrics: Mapping[str, Curve], not_finite: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """By metric, the steps at which a value is NaN or infinite, which is left out.

    A norm has a sign of its own, and a metric may be logged now and then, and be null in most lines.

    Args:
        metrics: finite values by rlstab's name.
        not_finite: all such steps, by the same name.
    """
    damaged = {}
    for ours, steps in not_finite.items():
        finite, _ = metrics.get(ours, EMPTY)
        sparse = 0 < len(finite) < len(steps) and int(finite[-1]) > steps[0]
        if steps and ours != "gradient/norm" and not sparse:
            damaged[ours] = steps
    return damaged


def _curves(points: Mapping[str, _Points]) -> dict[str, tuple[Curve, list[int]]]:
    """By name, the finite values, and the steps of the others."""
    found = {}
    for name, (logged, values) in points.items():
        steps, numbers = np.array(logged), np.array(values)
        finite = np.isfinite(numbers)
        found[name] = (steps[finite], numbers[finite]), steps[~finite].tolist()
    return found
