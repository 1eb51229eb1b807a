"""What a trainer logged of one run, under our names and ready for the detectors of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlstab.diagnose.metric_aliases import our_metrics
from rlstab.report.runs import MOST_ROLLOUTS, Curve, RunRecord, highest

#: Values by the names of the log; what was there and not finite is NaN.
Row = Mapping[str, float]


@dataclass(frozen=True, eq=False)
class RunLog:
    """One run as it was logged.

    Attributes:
        title: what the reader calls it: a path, or the name of the run in a table.
        writer: who wrote it, such as ``TRL``.
        unit: what its steps are: ``rollout`` or ``step``.
        curves: by our name steps (from 1) and finite values, each as often as the log has it.
        names: by our name the name in the log.
        bin_width: steps behind one value where the log keeps means of several, as a results file does; else 1.
        largest: of a results file, see :class:`rlstab.report.runs.RunRecord`.
        config: the settings of a run of rlstab; of others nothing is known.
        remarks: what could not be read, and why.
    """

    title: str
    writer: str
    unit: str
    curves: Mapping[str, Curve]
    names: Mapping[str, str]
    bin_width: int = 1
    largest: Mapping[str, Curve] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def last(self) -> int:
        """The last step."""
        return max((int(steps[-1]) for steps, _ in self.curves.values()), default=0)

    def record(self) -> RunRecord:
        """As the detectors of the report take it."""
        return RunRecord(
            bench=None,
            setting="default",
            method=self.title,
            seed=0,
            status="finished",
            path=self.title,
            config=self.config,
            evaluations=[],
            metrics=dict(self.curves),
            bin_width=self.bin_width,
            largest=dict(self.largest) or _largest(self.curves, self.last),
        )


def log_of(rows: Mapping[int, Row], *, title: str, writer: str, unit: str = "step", **others: Any) -> RunLog:
    """The rows of a log by step, under our names.

    Args:
        rows: by step; those of step 0 and below are of before the training and are left out.
        title: see :class:`RunLog`, as the rest.
        writer: who wrote it.
        unit: what a step is.
        **others: more of it.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    names: dict[str, str] = {}
    for step, row in sorted(rows.items()):
        if not 0 < step <= MOST_ROLLOUTS:
            continue
        metrics = our_metrics(row)
        if "gradient/norm" in metrics and "optimizer_steps/refused" not in metrics:
            name, norm = metrics["gradient/norm"]
            metrics["optimizer_steps/refused"] = name, float(not math.isfinite(norm))
        for ours, (name, value) in metrics.items():
            if math.isfinite(value):
                names.setdefault(ours, name)
                points.setdefault(ours, []).append((step, value))
    curves = {
        ours: (np.array([step for step, _ in pairs], np.int64), np.array([value for _, value in pairs], np.float64))
        for ours, pairs in points.items()
    }
    return RunLog(title, writer, unit, curves, names, **others)


def _largest(curves: Mapping[str, Curve], last: int) -> dict[str, Curve]:
    """Of a log without the largest norm of a step: the norms themselves."""
    norms = curves.get("gradient/largest_norm", curves.get("gradient/norm"))
    return {} if norms is None else {"gradient/largest_norm": highest(norms, last)}
