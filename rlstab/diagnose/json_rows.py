"""Metrics as JSON lines: verl's file logger, and any other file with one object per step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstab.config.renamed import new_record
from rlstab.diagnose.metric_aliases import known
from rlstab.diagnose.numbers_read import STEPS, number
from rlstab.diagnose.run_log import RunLog, log_of
from rlstab.errors import ReportError
from rlstab.report.formatting import counted, ranges
from rlstab.report.safe_read import read_bytes


def read_rows(path: Path) -> RunLog:
    """The run of a file of JSON lines; damaged lines are left out and counted.

    verl writes ``{"step": 3, "data": {...}}`` to ``VERL_FILE_LOGGER_PATH``; others write the values beside the step.

    Raises:
        ReportError: the file cannot be read, or no line has a step and a metric to look at.
    """
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError as error:
        reason = error.strerror or error
        raise ReportError(f"{path}: cannot be read: {reason}. Give a file that you may read.") from error
    rows: dict[int, dict[str, float]] = {}
    damaged: list[int] = []
    verl = own = False
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        data = _object(line)
        step = next((data[name] for name in STEPS if isinstance(data.get(name), int)), None)
        if step is None or isinstance(step, bool):
            damaged.append(place)
            continue
        own |= "rollout" in data
        inside = data.get("data")
        if isinstance(inside, Mapping):
            verl, data = True, dict(inside)
        row = {name: value for name, raw in new_record(data).items() if (value := number(raw)) is not None}
        rows.setdefault(step, {}).update(row)
    if not any(known(row) for row in rows.values()):
        raise ReportError(
            f"{path}: no line in it has a step and a metric that is known here. Give a file whose lines are those of "
            f"verl's file logger, or objects with a step and metrics named as in TRL, verl or rlstab."
        )
    remarks = (f"left out {counted(len(damaged), 'damaged line')}: {ranges(damaged)}",) if damaged else ()
    writer = "verl" if verl else "rlstab" if own else "JSON lines"
    return log_of(rows, title=str(path), writer=writer, unit="rollout" if own else "step", remarks=remarks)


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):  # also an integer of thousands of digits
        return {}
    return {str(name): value for name, value in data.items()} if isinstance(data, dict) else {}
