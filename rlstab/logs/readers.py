"""Reads the logs of other trainers and trackers.

``trainer_state.json`` of transformers (TRL, ms-swift), verl's file logger, other JSON lines, what trainers print (in a
notebook too), a CSV exported from wandb, and what wandb and TensorBoard keep in a folder. Damaged lines are left out
and counted.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlstab.console import counted, ranges
from rlstab.errors import ReportError, reason
from rlstab.files import exists, leads_away
from rlstab.logs import trackers
from rlstab.logs.console import printed
from rlstab.logs.log import Log, Rows
from rlstab.logs.metric_aliases import known
from rlstab.safe_read import as_number, as_step, parse_json, read_bytes, read_object, text_of

#: A file in every checkpoint of transformers, and in the output folder if the trainer was asked to save it.
STATE = "trainer_state.json"
#: The readable formats, for errors.
READABLE = (
    f"a run folder or results file of rlstab, {STATE} or an output folder of TRL, what a trainer printed, the file of "
    f"verl's file logger (.jsonl), a CSV exported from wandb, a folder with files of wandb or TensorBoard, a "
    f"database (.db) of Trackio or MLflow, or token exports of prime-rl"
)
#: What is wrong with a file of another kind.
NO_LINE = (
    "no line in it has a step and a known metric. Give a file whose lines are those of a trainer's console or of "
    "verl's file logger, or objects with a step and metrics named as in TRL, verl or rlstab."
)
#: Names of the number of a step, the likeliest first: wandb's own count is of calls to its log.
STEPS = (
    *("rollout", "train/global_step", "global_step", "training/global_step", "global_step/max_steps"),
    *("trainer/global_step", "iteration", "step", "Step", "_step"),
)
#: Number of lines that are searched for one that identifies the writer: the first may be damaged.
SNIFFED = 20
#: The files of trackers are searched this many folders below an output folder.
DEPTH = 4


def read_file(path: Path, text: str) -> list[Log]:
    """The runs in a file; more than one if it is a chart of wandb.

    Raises:
        ReportError: it is not a log with a known metric.
    """
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return _table(path, text)
    data, why = None, "has no log_history. Give a trainer_state.json that TRL's trainer has written."
    if text.lstrip().startswith(("{", "[")):
        try:
            data = parse_json(text)
        except ValueError as error:
            why = f"is not JSON: {reason(error)}. Give that of a whole checkpoint."
    if (history := _history(data)) is not None:
        return [_trainer_state(path, history, as_step(data.get("max_steps")) if isinstance(data, dict) else None)]
    if isinstance(data, dict) and "cells" in data:  # a notebook
        data, text = None, "\n".join(_outputs(data))
    found = _lines(path, text)
    if not found and data is None and not read_object(text.lstrip().partition("\n")[0]):
        found = _console(path, text)
        with suppress(ReportError):
            found = max(found, _table(path, _table_in(text)), key=lambda logs: sum(len(log.rows) for log in logs))
    if not found:
        raise ReportError(f"{path}: {why if suffix == '.json' else NO_LINE}")
    return found


def _history(data: Any) -> list[Any] | None:
    """The records in a JSON file: of transformers, or the most in one list that have a step and a known metric."""
    if isinstance(data, dict) and "log_history" in data:
        return data["log_history"] if isinstance(data["log_history"], list) else None
    lists = [inside for inside in _inside(data) if isinstance(inside, list)]
    return max(lists, key=_recorded, default=None) if any(_recorded(inside) > 1 for inside in lists) else None


def _recorded(records: list[Any]) -> int:
    return sum(isinstance(record, dict) and _step(record) is not None and known(record) for record in records)


def _inside(data: Any) -> Iterator[Any]:
    """Every value in JSON."""
    yield data
    for inside in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _inside(inside)


def _outputs(notebook: Any) -> Iterator[str]:
    """What the cells of a notebook have printed."""
    for output in _inside(notebook):
        for name in ("text", "text/html") if isinstance(output, dict) else ():
            if isinstance(output.get(name), str | list):
                yield "".join(map(str, output[name]))


def log_files(folder: Path) -> dict[str, list[Path]]:
    """By writer, the files of logs in the output folder of a trainer; writers in the order of preference."""

    def below(name: str) -> list[Path]:
        found = (path for depth in range(DEPTH) for path in folder.glob(f"{'*/' * depth}{name}"))
        # sorted by the time in the name of wandb's folder, or of TensorBoard's file
        ordered = sorted(found, key=lambda path: str(path) if path.suffix == ".wandb" else path.name)
        return list({path.resolve(): path for path in ordered}.values())  # wandb's latest-run is a link to another

    states = sorted(folder.glob(f"checkpoint-*/{STATE}"), key=lambda state: _number_of(state.parent.name), reverse=True)
    return {
        "TRL": [*([folder / STATE] if exists(folder / STATE) else []), *states],
        "verl": below("*.jsonl"),
        "wandb": below("*.wandb"),
        "TensorBoard": below("events.out.tfevents.*"),
    }


def read_folder(folder: Path) -> Log:
    """The one run that a trainer logged in its output folder, by the first writer whose files can be read.

    Raises:
        ReportError: no file there is a log with a metric to look at.
    """
    remarks: list[str] = []
    for writer, files in log_files(folder).items():
        if writer in _TRACKERS:
            log = _tracked(folder, writer, files, remarks) if files else None
        else:
            log = _longest(folder, files, remarks, newest=writer == "TRL")
        if log is not None:
            return replace(log, remarks=(*log.remarks, *remarks))
    why = f"{'; '.join(remarks)}." if remarks else f"Give {READABLE}."
    raise ReportError(f"{folder}: no log in it. {why}")


def _longest(folder: Path, files: Sequence[Path], remarks: list[str], *, newest: bool) -> Log | None:
    """The files with the longest history; of checkpoints only the newest readable one is used."""
    found: list[Log] = []
    for path in files:
        if newest and path.parent != folder and any(folder != Path(log.title).parent for log in found):
            break
        if leads_away(path) or (path.parent != folder and leads_away(path.parent)):
            remarks.append(f"left out {path}: a link that leads out of the folder")
            continue
        try:
            found += read_file(path, text_at(path))
        except ReportError as error:
            remarks.append(f"left out {str(error).rpartition('. ')[0]}")
    return max(found, key=lambda log: max(log.rows), default=None)


#: Readers of the files of a tracker: a row of values for each record, in the order of logging.
_TRACKERS: Mapping[str, Callable[[Path, list[str]], Iterable[Mapping[str, Any]]]] = {
    "wandb": trackers.wandb_rows,
    "TensorBoard": trackers.tensorboard_rows,
}


def _tracked(folder: Path, writer: str, files: Sequence[Path], remarks: list[str]) -> Log | None:
    """The run that a tracker kept in one file for each start."""
    rows = Rows()
    for path in files:
        try:
            for row in _TRACKERS[writer](path, remarks):
                if (step := _step(row)) is not None:
                    rows.log(step, _values(row))
        except OSError as error:
            remarks.append(f"left out {path}: {reason(error)}")
    if not any(known(row) for row in rows.values()):
        return None
    return Log(str(folder), writer, rows, rows.remarks)


def read_tracker(path: Path) -> Log:
    """The run in one file of wandb or TensorBoard.

    Raises:
        ReportError: it has no known metric, or cannot be read.
    """
    remarks: list[str] = []
    log = _tracked(path, "wandb" if path.suffix == ".wandb" else "TensorBoard", [path], remarks)
    if log is None:
        raise ReportError(f"{path}: no known metric in it. {'; '.join(remarks) or f'Give {READABLE}'}.")
    return replace(log, remarks=(*log.remarks, *remarks))


def read_database(path: Path) -> list[Log]:
    """The runs in a database of Trackio or MLflow that have a known metric.

    Raises:
        ReportError: there is none, or it cannot be read.
    """
    try:
        writer, runs = trackers.database_runs(path)
    except (OSError, TypeError, ValueError) as error:
        raise ReportError(f"{path}: cannot be read: {reason(error)}. Give {READABLE}.") from error
    logs = []
    for name, lines in runs:
        rows = Rows()
        for step, values in lines:
            rows.log(step, _values(values))
        if any(known(row) for row in rows.values()):
            logs.append(Log(f"{path}: {name}", writer, rows, rows.remarks))
    if not logs:
        raise ReportError(f"{path}: no run in it has a known metric. Give {READABLE}.")
    return logs


def text_at(path: Path) -> str:
    """The text of a log.

    Raises:
        ReportError: it cannot be read.
    """
    try:
        return text_of(read_bytes(path))
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {reason(error)}. Give {READABLE}.") from error


def _step(row: Mapping[str, Any]) -> int | None:
    """The number of a step: 61, 61.0, ``"61"``, or ``"61/500"`` as ms-swift writes it."""
    values = (row.get(name) for name in STEPS)
    steps = (as_step(value.partition("/")[0] if isinstance(value, str) else value) for value in values)
    return next((step for step in steps if step is not None), None)


def _values(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row; values that were not finite are NaN, which some writers put as JSON's null."""
    values = {name: math.nan if value is None else as_number(value) for name, value in row.items()}
    return {name: value for name, value in values.items() if value is not None}


def _left_out(numbers: list[int], what: str) -> tuple[str, ...]:
    return (f"left out {counted(len(numbers), what)}: {ranges(numbers)}",) if numbers else ()


# -- lines -------------------------------------------------------------------------------------------------------------


def _lines(path: Path, text: str) -> list[Log]:
    """JSON objects with values next to the step or, as in verl's file logger, under ``data``; empty without any."""
    rows = Rows()
    damaged: list[int] = []
    writers: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        data = read_object(line)
        step = _step(data)
        if step is None:
            damaged.append(number)
            continue
        inside = data.get("data")
        writers.add("verl" if isinstance(inside, dict) else "rlstab" if "rollout" in data else "JSON lines")
        rows.log(step, _values(inside if isinstance(inside, dict) else data))
    if not any(known(row) for row in rows.values()):
        return []
    writer = next(name for name in ("verl", "rlstab", "JSON lines") if name in writers)
    unit = "rollout" if writer == "rlstab" else "step"
    remarks = (*_left_out(damaged, "damaged line"), *rows.remarks)
    return [Log(str(path), writer, rows, remarks, unit)]


def _console(path: Path, text: str) -> list[Log]:
    """What a trainer printed. Other lines are normal there, not damaged."""
    rows, remarks = Rows(), list[str]()
    writer, steps = printed(text, _step, remarks)
    for step, values in steps:
        rows.log(step, _values(values))
    if path.suffix.lower() == ".json":
        remarks.append("it is not whole JSON, and is read as text")
    known_rows = any(known(row) for row in rows.values())
    return [Log(str(path), writer, rows, (*remarks, *rows.remarks))] if known_rows else []


# -- transformers ------------------------------------------------------------------------------------------------------


def _number_of(checkpoint: str) -> int:
    """The step of a checkpoint, by the name of its folder; 0 without one."""
    digits = checkpoint.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _trainer_state(path: Path, history: Sequence[Any], planned: int | None) -> Log:
    rows = Rows()
    damaged = 0
    for entry in history:
        step = _step(entry) if isinstance(entry, dict) else None
        if step is None:
            damaged += 1
        else:
            # metrics of an evaluation begin with eval_, and the last entry sums up: neither has known names
            rows.log(step, _values(entry))
    left_out = (f"log_history: left out {counted(damaged, 'record')} without a step",) if damaged else ()
    return Log(str(path), "TRL", rows, (*left_out, *rows.remarks), planned=planned or None)


# -- wandb -------------------------------------------------------------------------------------------------------------

#: Separates the name of a run from that of a metric, in the head of a chart's column.
BETWEEN = " - "
#: A chart writes each curve three times, twice with these ends.
ENVELOPE = ("__MIN", "__MAX")
#: Between the cells of a table.
DELIMITERS = ",\t;|"
#: Characters of the longest cell: a column may hold a table of samples.
_CELL = 10**7


def _table(path: Path, text: str) -> list[Log]:
    """The rows of one run, or of a chart with a column for each run."""
    csv.field_size_limit(_CELL)
    first = text.partition("\n")[0]
    try:
        lines = csv.reader(io.StringIO(text), delimiter=max(DELIMITERS, key=first.count))
        head, *cells = [line for line in lines if line] or [[]]
        head = [name.strip() for name in head]
    except csv.Error as error:
        raise ReportError(f"{path}: is not a table: {error}. Export it from wandb again.") from error
    if not set(STEPS) & set(head):
        raise ReportError(f"{path}: no column of steps. Export it with one of {', '.join(STEPS)}.")
    columns = [_column(name) for name in head]
    runs: dict[str, Rows] = {}
    damaged: list[int] = []
    for number, line in enumerate(cells, 2):
        step = _step(dict(zip(head, line, strict=False)))
        if step is None:
            damaged.append(number)
            continue
        values: dict[str, dict[str, float]] = {}
        for (run, metric), cell in zip(columns, line, strict=False):
            value = as_number(cell)
            if metric and value is not None:
                values.setdefault(run, {})[metric] = value
        for run, row in values.items():
            runs.setdefault(run, Rows()).log(step, row)
    left_out = _left_out(damaged, "row without a step")
    logs = [
        Log(f"{path}: {run}" if run else str(path), "wandb", rows, (*left_out, *rows.remarks))
        for run, rows in runs.items()
        if any(known(row) for row in rows.values())
    ]
    if not logs:
        raise ReportError(
            f"{path}: it has no column with a known metric. Export metrics named as in TRL, verl or rlstab, such "
            f"as reward, entropy and grad_norm."
        )
    return logs


def _table_in(text: str) -> str:
    """The table in a text, from its head on: of a notebook, an issue, or a file of any name; empty without one."""
    text = re.sub(r"\s*<t[hd]\b[^>]*>\s*", "\t", text)
    lines = [
        line.strip(" \r").removeprefix("\t") for line in re.sub(r"<[^>]*>", "", text.replace("</tr>", "\n")).split("\n")
    ]
    for number, line in enumerate(lines):
        between = max(DELIMITERS, key=line.count)
        names = [name.strip() for name in line.split(between)]
        if set(STEPS) & set(names) and known(names):
            return "\n".join(row for row in lines[number:] if row.count(between) == line.count(between))
    return ""


def _column(head: str) -> tuple[str, str]:
    """Run and metric of a column; no metric if it is only the envelope of a curve."""
    if head.endswith(ENVELOPE):
        return "", ""
    run, between, metric = head.rpartition(BETWEEN)
    return (run, metric) if between else ("", head)
