"""A CSV exported from wandb: the rows of one run, or of a chart with a column for each run."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from rlstab.diagnose.metric_aliases import known
from rlstab.diagnose.numbers_read import STEPS, written_number
from rlstab.diagnose.run_log import RunLog, log_of
from rlstab.errors import ReportError
from rlstab.report.formatting import counted, ranges
from rlstab.report.safe_read import read_bytes

#: Between the name of a run and that of a metric, in the head of a chart's column.
BETWEEN = " - "
#: A chart writes each curve three times, twice with these ends.
ENVELOPE = ("__MIN", "__MAX")


def read_table(path: Path) -> list[RunLog]:
    """The runs of a table; rows without a step are left out and counted.

    Raises:
        ReportError: it cannot be read, or has no column of steps or none of a metric to look at.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig", errors="replace")
    except OSError as error:
        reason = error.strerror or error
        raise ReportError(f"{path}: cannot be read: {reason}. Give a file that you may read.") from error
    csv.field_size_limit(10**7)  # a table of samples among the columns
    lines = csv.reader(io.StringIO(text), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    try:
        head, *cells = [line for line in lines if line] or [[]]
    except csv.Error as error:
        raise ReportError(f"{path}: is not a table: {error}. Export it from wandb again.") from error
    place = next((head.index(name) for name in STEPS if name in head), None)
    if place is None:
        raise ReportError(f"{path}: no column of steps. Export it with one of {', '.join(STEPS)}.")
    columns = [_column(name) for name in head]
    found: dict[str, dict[int, dict[str, float]]] = {}
    damaged: list[int] = []
    for number, line in enumerate(cells, 2):
        step = written_number(line[place]) if len(line) > place else None
        if step is None or not step.is_integer():
            damaged.append(number)
            continue
        for (run, metric), cell in zip(columns, line, strict=False):
            value = written_number(cell)
            if metric and value is not None:
                found.setdefault(run, {}).setdefault(int(step), {})[metric] = value
    logs = [
        log_of(
            rows,
            title=f"{path}: {run}" if run else str(path),
            writer="wandb",
            remarks=(f"left out {counted(len(damaged), 'row')} without a step: {ranges(damaged)}",) if damaged else (),
        )
        for run, rows in found.items()
        if any(known(row) for row in rows.values())
    ]
    if not logs:
        raise ReportError(
            f"{path}: no column of a metric that is known here. Export metrics named as in TRL, verl or rlstab, such "
            f"as reward, entropy and grad_norm."
        )
    return logs


def _column(head: str) -> tuple[str, str]:
    """Run and metric of a column; no metric where it is only the envelope of a curve."""
    if head.endswith(ENVELOPE):
        return "", ""
    run, between, metric = head.rpartition(BETWEEN)
    return (run, metric) if between else ("", head)
