"""What a trainer logged of one run, under our names and ready for the detectors of the report."""

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

#: Values by the names of the log; what was there and not finite is NaN.
Row = Mapping[str, float]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunLog(RunRecord):
    """One run as it was logged, a record for the detectors of the report.

    Attributes:
        path: what the reader calls it: a path, or the name of the run in a table.
        metrics: by our name steps (from 1) and finite values, each as often as the log has it.
        config: the settings of a run of rlstab; of others nothing is known.
        writer: who wrote it, such as ``TRL``.
        unit: what its steps are: ``rollout`` or ``step``.
        names: by our name the name in the log.
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
        """What the reader calls it."""
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
    """The rows of a log by step, under our names.

    Args:
        rows: by step. Where a step of another trainer has number 0, all steps are counted from 1.
        title: what the reader calls it.
        writer: who wrote it.
        unit: what a step is.
        remarks: what was left out of it.
        **others: more of it.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    names: dict[str, str] = {}
    # what rlstab writes at rollout 0 is an evaluation; another trainer that logs a metric of training there trained
    shift = int(unit == "step" and known(rows.get(0, ())))
    steps = sorted(step for step in rows if 0 <= step < MOST_ROLLOUTS)
    for step in steps if shift else filter(None, steps):
        metrics = our_metrics(rows[step])
        if "gradient/norm" in metrics and "optimizer_steps/refused" not in metrics:
            name, norm = metrics["gradient/norm"]
            metrics["optimizer_steps/refused"] = name, float(not math.isfinite(norm))
        for ours, (name, value) in metrics.items():
            # of several data sets that are held out, one is looked at
            if math.isfinite(value) and not (names.setdefault(ours, name) != name and ours == "eval/mean"):
                points.setdefault(ours, []).append((step + shift, value))
    curves = {
        ours: (np.array([step for step, _ in pairs], np.int64), np.array([value for _, value in pairs], np.float64))
        for ours, pairs in points.items()
    }
    if shift:
        remarks += ("its steps begin at 0 and are counted from 1 here",)
    if beyond := len(rows) - len(steps):
        remarks += (f"left out {counted(beyond, unit)} below 0 or above {MOST_ROLLOUTS:,}",)
    if missing := gaps({step for pairs in points.values() for step, _ in pairs}):
        remarks += (f"no line for {unit} {missing}",)
    return RunLog(path=title, writer=writer, unit=unit, metrics=curves, names=names, remarks=remarks, **others)
