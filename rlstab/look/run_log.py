"""What any known trainer or tracker logged under a path, under rlstab's names and ready for the detectors of signs.

Logs of other trainers and trackers, see :mod:`rlstab.logs.readers`; those of rlstab, and recorded optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlstab.errors import ReportError
from rlstab.files import exists, is_dir
from rlstab.logs.log import Log, LoggedCurves, curves_of
from rlstab.logs.readers import (
    READABLE,
    SNIFFED,
    log_files,
    read_database,
    read_file,
    read_folder,
    read_tracker,
    text_at,
)
from rlstab.report.load import find_runs
from rlstab.report.runs import RunRecord
from rlstab.safe_read import read_object


@dataclass(frozen=True, eq=False, kw_only=True)
class RunLog(LoggedCurves):
    """One run as it was logged.

    Attributes:
        title: its name for the reader: a path, or the name of the run in a table.
        writer: the trainer that wrote it, such as ``TRL``.
        config: the settings of a run of rlstab; empty for others.
        remarks: what could not be read or was changed.
    """

    title: str
    writer: str
    config: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def log_of(log: Log, **others: Any) -> RunLog:
    """A log under rlstab's names.

    Args:
        log: as it was read.
        **others: fields that a log of rlstab has in addition.
    """
    curves = curves_of(log.rows, log.unit)
    told = (*log.remarks, *curves.changes)
    return RunLog(**{**vars(curves), **others}, title=log.title, writer=log.writer, remarks=told)


def read_logs(path: str | Path) -> list[RunLog]:
    """Every run that was logged under a path.

    Raises:
        ReportError: the path does not exist, or holds no log with a known metric.
    """
    path = Path(path)
    if is_dir(path):
        return _folder(path)
    if not exists(path):
        raise ReportError(f"{path}: no such file or folder. Give {READABLE}.")
    if path.suffix.lower() == ".db":
        return list(map(log_of, read_database(path)))
    if path.suffix == ".wandb" or ".tfevents." in path.name:
        return [log_of(read_tracker(path))]
    text = text_at(path)
    if path.suffix.lower() not in (".csv", ".tsv"):
        for _, line in zip(range(SNIFFED), text.split("\n", SNIFFED), strict=False):
            if data := read_object(line):
                if "curves" in data and "format" in data:
                    return _own(path)
                break
    return list(map(log_of, read_file(path, text)))


def _folder(path: Path) -> list[RunLog]:
    files = log_files(path)
    if not files["TRL"]:
        try:
            return _own(path)
        except ReportError as error:
            if databases := sorted(path.glob("*.db")):
                return list(map(log_of, read_database(databases[0])))
            if not any(files.values()):
                raise ReportError(f"{path}: no log in it. Give {READABLE}.") from error
    return [log_of(read_folder(path))]


# -- rlstab ------------------------------------------------------------------------------------------------------------


def _own(path: Path) -> list[RunLog]:
    """Run folders, bench folders, results files."""
    runs, left_out = find_runs(path)
    logs = [_own_run(run) for run in runs]
    if left_out and logs:
        # what is left out belongs to no run; the first run reports it
        told = tuple(f"left out {item.path}: {item.why}" for item in left_out)
        logs[0] = replace(logs[0], remarks=(*logs[0].remarks, *told))
    return logs


def _own_run(run: RunRecord) -> RunLog:
    rows: dict[int, dict[str, float]] = {}
    for name, (rollouts, values) in run.metrics.items():
        for rollout, value in zip(rollouts.tolist(), values.tolist(), strict=True):
            rows.setdefault(rollout, {})[name] = value
    title = run.path if run.bench is None else f"{run.path} ({run.title})"
    return log_of(
        Log(title, "rlstab", rows, run.remarks, "rollout"),
        bin_width=run.bin_width,
        largest=run.largest,
        evaluations=run.evaluations,
        config=run.config,
    )
