"""What a trainer logged of one run, under our names and ready for the detectors of the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlstab.logs.log import curves_of
from rlstab.report.runs import RunRecord, Status

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
    curves = curves_of(rows, unit)
    told = (*remarks, *curves.remarks)
    return RunLog(
        path=title, writer=writer, unit=unit, metrics=curves.metrics, names=curves.names, remarks=told, **others
    )
