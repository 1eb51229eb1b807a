"""The log of one run under rlstab's names, ready for the detectors of signs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlstab.diagnose.metric_aliases import known, our_metrics
from rlstab.report.formatting import counted
from rlstab.report.runs import MOST_ROLLOUTS, RunRecord, Status
from rlstab.safe_read import gaps

#: Values by the names of the log; those that are not finite are NaN.
Row = Mapping[str, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunLog(RunRecord):
    """One run as it was logged, as a record for the detectors of signs.

    Attributes:
        path: a path, or the name of the run in a table.
        metrics: by rlstab's name, steps (from 1) and finite values, as often as they were logged.
        config: the settings of a run of rlstab; empty for other trainers.
        writer: the trainer or tracker, such as ``TRL``.
        unit: of its steps: ``rollout`` or ``step``.
        names: by rlstab's name, the name in the log.
    """

    bench: str | None = None
    setting: str = "default"
    method: str = ""
    seed: int = 0
    status: Status = "finished"
    evaluations: list[dict[str, float]] = field(default_factory=list)
    writer: str
    unit: str
    names: Mapping[str, str]

    @property
    def title(self) -> str:
        """The name of the run for readers."""
        return self.path


def log_of(
    rows: Mapping[int, Row],
    *,
    title: str,
    writer: str,
    unit: str = "step",
    remarks: tuple[str, ...] = (),
    **others: Any,
) -> RunLog:
    """The rows of a log, by step, under rlstab's names.

    Args:
        rows: by step. If another trainer begins at step 0, steps are counted from 1.
        title: the name of the run for readers.
        writer: the trainer or tracker.
        unit: of its steps.
        remarks: on what was left out.
        **others: other fields of the record.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    names: dict[str, str] = {}
    # at rollout 0 rlstab writes an evaluation; another trainer that logs a metric of training at step 0 has trained
    shift = int(unit == "step" and known(rows.get(0, ())))
    steps = sorted(step for step in rows if 0 <= step < MOST_ROLLOUTS)
    for step in steps if shift else filter(None, steps):
        metrics = our_metrics(rows[step])
        if "gradient/norm" in metrics and "optimizer_steps/refused" not in metrics:
            name, norm = metrics["gradient/norm"]
            metrics["optimizer_steps/refused"] = name, float(not math.isfinite(norm))
        for ours, (name, value) in metrics.items():
            if math.isfinite(value):
                names.setdefault(ours, name)
                points.setdefault(ours, []).append((step + shift, value))
    curves = {
        ours: (np.array([step for step, _ in pairs], np.int64), np.array([value for _, value in pairs], np.float64))
        for ours, pairs in points.items()
    }
    if shift:
        remarks += ("its steps begin at 0 and are counted from 1",)
    if beyond := len(rows) - len(steps):
        remarks += (f"left out {counted(beyond, unit)} below 0 or above {MOST_ROLLOUTS:,}",)
    if missing := gaps({step for pairs in points.values() for step, _ in pairs}):
        remarks += (f"no line for {unit} {missing}",)
    return RunLog(path=title, writer=writer, unit=unit, metrics=curves, names=names, remarks=remarks, **others)
