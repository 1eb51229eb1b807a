"""Reads the logs of other trainers that are text.

``trainer_state.json`` of transformers (TRL, ms-swift), verl's file logger, other JSON lines, what trainers print (in a
notebook too), and a CSV exported from wandb. Damaged lines are left out and counted.
"""

import csv
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlstab.bins import Run
from rlstab.console import counted
from rlstab.errors import ReportError, reason
from rlstab.logs.console import printed
from rlstab.logs.log import STEPS, known, left_out, logged, step_of
from rlstab.safe_read import as_number, as_step, parse_json, read_object

#: A file in every checkpoint of transformers, and in the output folder if the trainer was asked to save it.
STATE = "trainer_state.json"
#: What is wrong with a file of another kind.
NO_LINE = (
    "no line in it has a step and a known metric. Give a file whose lines are those of a trainer's console or of "
    "verl's file logger, or objects with a step and metrics named as in TRL, verl or rlstab."
)
#: Characters of a file that are searched for a null character, which no text has.
BINARY = 4096


def read_text(path: Path, text: str) -> list[Run]:
    """The runs in a text, by its content; several if it is a chart of wandb, or has several tables.

    Raises:
        ReportError: it is not a log with a known metric.
    """
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        return _table(path, text)
    data, reason_not = None, "has no log_history. Give a trainer_state.json that TRL's trainer has written."
    if text.lstrip().startswith(("{", "[")):
        try:
            data = parse_json(text)
        except ValueError as error:
            reason_not = f"is not JSON: {reason(error)}. Give that of a whole checkpoint."
    if (history := _history(data)) is not None:
        # the records of transformers; metrics of an evaluation begin with eval_, and the last record sums up
        records = [(step, row) for row in history if isinstance(row, dict) and (step := step_of(row)) is not None]
        damaged = len(history) - len(records)
        remarks = [f"log_history: left out {counted(damaged, 'record')} without a step"] if damaged else []
        planned = as_step(data.get("max_steps")) if isinstance(data, dict) else None
        runs = logged(path, "TRL", records, remarks, planned=planned or None)
        if not runs:
            raise ReportError(f"{path}: no record of its log_history has a known metric, such as reward or grad_norm.")
        return runs
    if isinstance(data, dict) and "cells" in data:  # a notebook
        data, text = None, "\n".join(_outputs(data))
    runs = _lines(path, text)
    is_text = "\0" not in text[:BINARY] and not read_object(text.lstrip().partition("\n")[0])  # nor JSON lines
    if not runs and data is None and is_text:
        # other lines are normal in what a trainer printed, not damaged
        remarks = ["it is not whole JSON, and is read as text"] if suffix == ".json" else []
        writer, steps = printed(text, remarks)
        candidates = logged(path, writer, steps, remarks), _tables(path, text)
        runs = max(candidates, key=lambda runs: sum(len(steps) for run in runs for steps, _ in run.metrics.values()))
    if not runs:
        raise ReportError(f"{path}: {reason_not if suffix == '.json' else NO_LINE}")
    return runs


def _history(data: Any) -> list[Any] | None:
    """The records in a JSON file: of transformers, or the most in one list that have a step and a known metric."""
    if isinstance(data, dict) and "log_history" in data:
        return data["log_history"] if isinstance(data["log_history"], list) else None
    lists = [value for value in _inside(data) if isinstance(value, list)]
    history = max(lists, key=_recorded, default=[])
    return history if _recorded(history) > 1 else None


def _recorded(records: list[Any]) -> int:
    return sum(isinstance(record, dict) and step_of(record) is not None and known(record) for record in records)


def _inside(data: Any) -> Iterator[Any]:
    """Every value in JSON."""
    yield data
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from _inside(value)


def _outputs(notebook: Any) -> Iterator[str]:
    """What the cells of a notebook have printed."""
    for output in _inside(notebook):
        for name in ("text", "text/html") if isinstance(output, dict) else ():
            if isinstance(output.get(name), str | list):
                yield "".join(map(str, output[name]))


# -- lines -------------------------------------------------------------------------------------------------------------


def _lines(path: Path, text: str) -> list[Run]:
    """JSON objects with values next to the step or, as in verl's file logger, under ``data``; empty without any."""
    steps: list[tuple[int, dict[str, Any]]] = []
    damaged: list[int] = []
    writers: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        data = read_object(line) if line.lstrip().startswith("{") else {}
        if (step := step_of(data) if data else None) is None:
            damaged.append(number)
            continue
        values = data["data"] if isinstance(data.get("data"), dict) else data
        writers.add("verl" if values is not data else "rlstab" if "rollout" in data else "JSON lines")
        steps.append((step, values))
    writer = next((name for name in ("verl", "rlstab", "JSON lines") if name in writers), "")
    unit = "rollout" if writer == "rlstab" else "step"
    return logged(path, writer, steps, left_out(damaged, "damaged line"), unit=unit)


# -- wandb -------------------------------------------------------------------------------------------------------------

#: Separates the name of a run from that of a metric, in the head of a chart's column.
BETWEEN = " - "
#: A chart writes each curve three times, twice with these ends.
ENVELOPE = ("__MIN", "__MAX")
#: Between the cells of a table.
DELIMITERS = ",\t;|"
#: Characters of the longest cell: a column may hold a table of samples.
_CELL = 10**7


def _table(path: Path, text: str) -> list[Run]:
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
    columns = [name.rpartition(BETWEEN) for name in head]
    runs: dict[str, list[tuple[int, dict[str, str]]]] = {}
    damaged: list[int] = []
    for number, line in enumerate(cells, 2):
        if (step := step_of(dict(zip(head, line, strict=False)))) is None:
            damaged.append(number)
            continue
        values: dict[str, dict[str, str]] = {}
        for (run, _, metric), cell in zip(columns, line, strict=False):
            if metric and not metric.endswith(ENVELOPE) and as_number(cell) is not None:
                values.setdefault(run, {})[metric] = cell
        for run, row in values.items():
            runs.setdefault(run, []).append((step, row))
    remarks = left_out(damaged, "row without a step")
    named = ((f"{path}: {run}" if run else path, steps) for run, steps in runs.items())
    logs = [log for name, steps in named for log in logged(name, "wandb", steps, remarks)]
    if not logs:
        raise ReportError(
            f"{path}: it has no column with a known metric. Export metrics named as in TRL, verl or rlstab, such "
            f"as reward, entropy and grad_norm."
        )
    return logs


def _tables(path: Path, text: str) -> list[Run]:
    """The runs in the tables of a text: of a notebook, an issue, or a file of any name."""
    if "</tr>" in text:
        text = re.sub(r"\s*<t[hd]\b[^>]*>\s*", "\t", text).replace("</tr>", "\n")
    tables: list[list[str]] = []
    between, width = ",", 0
    for line in re.sub(r"<[^>]*>", "", text).split("\n"):
        row = line.strip(" \r").removeprefix("\t")
        if any(name in row for name in STEPS):  # perhaps the head of a table
            delimiter = max(DELIMITERS, key=row.count)
            names = [name.strip() for name in row.split(delimiter)]
            if set(STEPS) & set(names) and known(names):
                between, width = delimiter, row.count(delimiter)
                tables.append([])
        if tables and row.count(between) == width:
            tables[-1].append(row)
    runs: list[Run] = []
    for number, table in enumerate(tables, 1):
        with suppress(ReportError):
            runs += _table(Path(f"{path}: table {number}") if len(tables) > 1 else path, "\n".join(table))
    return runs
