"""Runs of rlstab: run folders, bench folders, results files."""

from __future__ import annotations

from pathlib import Path

from rlstab.diagnose.run_log import RunLog, log_of
from rlstab.report.load import find_runs
from rlstab.report.runs import RunRecord


def read_own(path: Path) -> list[RunLog]:
    """The runs under a path, each under the name of its folder or its line.

    Raises:
        ReportError: there is none that can be used.
    """
    runs, left_out = find_runs(path)
    logs = [_log(run) for run in runs]
    if left_out and logs:
        # what is left out belongs to no run; the first one tells it
        told = tuple(f"left out {one.path}: {one.why}" for one in left_out)
        first = logs[0]
        logs[0] = RunLog(**{**vars(first), "remarks": (*first.remarks, *told)})
    return logs


def _log(run: RunRecord) -> RunLog:
    rows: dict[int, dict[str, float]] = {}
    for name, (rollouts, values) in run.metrics.items():
        for rollout, value in zip(rollouts.tolist(), values.tolist(), strict=True):
            rows.setdefault(rollout, {})[name] = value
    return log_of(
        rows,
        title=run.path if run.bench is None else f"{run.path} ({run.title})",
        writer="rlstab",
        unit="rollout",
        bin_width=run.bin_width,
        largest=run.largest,
        config=run.config,
        remarks=run.remarks,
    )
