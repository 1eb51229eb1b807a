"""What rlstab, or any known trainer or tracker, logged under a path, under rlstab's names."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rlstab.bins import Run
from rlstab.errors import ReportError
from rlstab.files import is_dir, is_file
from rlstab.logs import source
from rlstab.logs.log import Rows
from rlstab.report.load import find_runs
from rlstab.report.runs import RunRecord
from rlstab.safe_read import read_object

#: Number of lines that are searched for one that identifies the writer: the first may be damaged.
SNIFFED = 20
#: Endings of files that are not text.
BINARY = (".db", ".wandb")


def read_logs(path: str | Path) -> list[Run]:
    """Every run that was logged under a path.

    Raises:
        ReportError: the path does not exist, or holds no log with a known metric.
    """
    path = Path(path)
    if is_dir(path) and not source.log_files(path)["TRL"]:
        with suppress(ReportError):
            return _own(path)
    return _own(path) if is_file(path) and _is_results(path) else source.read_logs(path)


def _is_results(path: Path) -> bool:
    """Whether a file is a results file of rlstab."""
    if path.suffix.lower() in BINARY or ".tfevents." in path.name:
        return False
    lines = source.text_at(path).split("\n", SNIFFED)[:SNIFFED]
    data = next(filter(None, map(read_object, lines)), {})
    return "curves" in data and "format" in data


def _own(path: Path) -> list[Run]:
    """Run folders, bench folders, results files."""
    runs, left_out = find_runs(path)
    logs = list(map(_under_names, runs))
    if left_out and logs:
        # what is left out belongs to no run; the first run reports it
        remarks = tuple(f"left out {item.path}: {item.why}" for item in left_out)
        logs[0] = replace(logs[0], remarks=(*logs[0].remarks, *remarks))
    return logs


def _under_names(run: RunRecord) -> Run:
    """A run of rlstab, with the metrics that other trainers log and rlstab has in parts."""
    rows: dict[int, dict[str, float]] = {}
    for name, (rollouts, values) in run.metrics.items():
        for rollout, value in zip(rollouts.tolist(), values.tolist(), strict=True):
            rows.setdefault(rollout, {})[name] = value
    path = run.path if run.bench is None else f"{run.path} ({run.title})"
    return replace(
        Rows(rows, "rollout").run(path, "rlstab", run.remarks),
        bin_width=run.bin_width,
        largest=run.largest,
        evaluations=run.evaluations,
        judged=run.judged,
        config=run.config,
    )
