"""Reads the runs that any known trainer or tracker logged under a path.

Logs of rlstab, ``trainer_state.json`` of transformers (TRL, ms-swift), verl's file logger and its console, other JSON
lines, a CSV exported from wandb, and token exports of prime-rl. Damaged lines are left out and counted.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlstab.diagnose.metric_aliases import known
from rlstab.diagnose.run_log import RunLog, log_of
from rlstab.errors import ReportError, reason
from rlstab.files import exists, is_dir, leads_away
from rlstab.record import Step, read_dump
from rlstab.record.foreign import exports
from rlstab.record.step import DID
from rlstab.report.formatting import counted, ranges
from rlstab.report.load import find_runs
from rlstab.report.runs import RunRecord
from rlstab.safe_read import as_number, as_step, parse_json, read_bytes, read_object, text_of

#: In every checkpoint of transformers, and in the output folder where the trainer was asked to save it.
STATE = "trainer_state.json"
#: What can be read, for errors.
READABLE = (
    f"a run folder or results file of rlstab, {STATE} or an output folder of TRL, verl's console log or the file of "
    f"its file logger (.jsonl), a CSV exported from wandb, or token exports of prime-rl"
)
#: What trainers and trackers call the number of a step, the likeliest first: wandb's own count is of calls to its log.
STEPS = (
    *("rollout", "train/global_step", "global_step", "training/global_step", "global_step/max_steps"),
    *("step", "Step", "_step"),
)
#: Lines in which one that tells the writer is looked for: the first may be damaged.
SNIFFED = 20


class _Rows(dict[int, dict[str, float]]):
    """Values by step and name, added in the order of the log.

    A run that is resumed from an older checkpoint logs steps a second time. The later line counts, and what the first
    branch logged from there on is dropped.
    """

    def __init__(self) -> None:
        self.last = 0
        self.abandoned: set[int] = set()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # a late evaluation of an older step repeats no metric that is known here
        if step < self.last and known(values.keys() & self.get(step, {}).keys()):
            branch = {later for later in self if later >= step}
            self.abandoned |= branch
            for later in branch:
                del self[later]
            self.last = step
        self.setdefault(step, {}).update(values)
        self.last = max(self.last, step)

    @property
    def remarks(self) -> tuple[str, ...]:
        if not self.abandoned:
            return ()
        first = f"the run was resumed from an earlier step, and logs step {min(self.abandoned)} again"
        return (f"{first}: left out what it had logged of steps {ranges(self.abandoned)} before",)


def read_logs(path: str | Path) -> list[RunLog]:
    """Every run that was logged under a path.

    Raises:
        ReportError: no such path, or nothing there that is a log with a metric to look at.
    """
    path = Path(path)
    if is_dir(path):
        return _folder(path)
    if not exists(path):
        raise ReportError(f"{path}: no such file or folder. Give {READABLE}.")
    text = _read(path)
    if path.suffix.lower() in (".csv", ".tsv"):
        return _table(path, text)
    for _, line in zip(range(SNIFFED), text.split("\n", SNIFFED), strict=False):
        if data := read_object(line):
            if "curves" in data and "format" in data:
                return _own(path)
            if "token_ids" in data or ("tokens" in data and "sequence_id" in data):
                return _tokens(path)
            break
    return _trainer_state(path, text) if path.suffix.lower() == ".json" else _lines(path, text)


def _folder(path: Path) -> list[RunLog]:
    if (path / STATE).is_file() or any(path.glob(f"checkpoint-*/{STATE}")):
        return _output_folder(path)
    if exports(path):
        return _tokens(path)
    try:
        return _own(path)
    except ReportError as error:
        raise ReportError(f"{path}: no log in it. Give {READABLE}.") from error


def _read(path: Path) -> str:
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
    """The numbers of a row; what was there and not finite is NaN, and JSON's null is what writers of NaN mean by it."""
    values = {name: math.nan if value is None else as_number(value) for name, value in row.items()}
    return {name: value for name, value in values.items() if value is not None}


def _left_out(numbers: list[int], what: str) -> tuple[str, ...]:
    return (f"left out {counted(len(numbers), what)}: {ranges(numbers)}",) if numbers else ()


# -- lines -------------------------------------------------------------------------------------------------------------

#: A step on verl's console, behind what Ray and progress bars write before it.
_CONSOLE = re.compile(r"(?<![\w/])step:(\d{1,18}) - (.*)")
#: A number as numpy prints it: ``np.float64(0.2)``.
_NUMPY = re.compile(r"(?:np|numpy)\.\w+\((.*)\)")


def _lines(path: Path, text: str) -> list[RunLog]:
    """Objects of JSON with their values next to the step or, as by verl's file logger, under ``data``; or a console."""
    rows = _Rows()
    damaged: list[int] = []
    writers: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if told := _CONSOLE.search(line):
            writers.add("verl")
            rows.log(int(told[1]), dict(_console(told[2])))
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
        raise ReportError(
            f"{path}: no line in it has a step and a metric that is known here. Give a file whose lines are those of "
            f"verl's console or file logger, or objects with a step and metrics named as in TRL, verl or rlstab."
        )
    if _CONSOLE.search(text):  # a console has other lines, which are not damaged
        damaged = []
    writer = next(name for name in ("verl", "rlstab", "JSON lines") if name in writers)
    unit = "rollout" if writer == "rlstab" else "step"
    remarks = (*_left_out(damaged, "damaged line"), *rows.remarks)
    return [log_of(rows, title=str(path), writer=writer, unit=unit, remarks=remarks)]


def _console(text: str) -> Iterator[tuple[str, float]]:
    """The ``name:value`` of a line of verl's console."""
    for item in text.strip().split(" - "):
        name, _, value = item.rpartition(":")
        number = as_number(wrapped[1] if (wrapped := _NUMPY.fullmatch(value.strip())) else value)
        if number is not None:
            yield name, number


# -- transformers ------------------------------------------------------------------------------------------------------


def _number_of(checkpoint: str) -> int:
    """Of a checkpoint, by the name of its folder; 0 without one."""
    digits = checkpoint.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _output_folder(path: Path) -> list[RunLog]:
    """What holds the longest history: the state of the folder itself, or of the newest checkpoint that can be read."""
    remarks: list[str] = []
    found: list[RunLog] = []
    states = sorted(path.glob(f"checkpoint-*/{STATE}"), key=lambda state: _number_of(state.parent.name), reverse=True)
    for newest in ([path / STATE], states):
        for state in newest:
            if not exists(state):
                continue
            if leads_away(state) or (state.parent != path and leads_away(state.parent)):
                remarks.append(f"left out {state}: a link that leads out of the folder")
                continue
            try:
                found += _trainer_state(state, _read(state))
                break
            except ReportError as error:
                remarks.append(f"left out {str(error).rpartition('. ')[0]}")
    if not found:
        raise ReportError(f"{path}: no log in it. {'; '.join(remarks)}")
    log = max(found, key=lambda log: log.rollouts)
    return [replace(log, remarks=(*log.remarks, *remarks))]


def _trainer_state(path: Path, text: str) -> list[RunLog]:
    try:
        state = parse_json(text)
    except ValueError as error:
        if any(_step(read_object(line)) is not None for line in text.split("\n", SNIFFED)[:SNIFFED]):
            return _lines(path, text)
        raise ReportError(f"{path}: is not JSON: {reason(error)}. Give that of a whole checkpoint.") from error
    history = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(history, list):
        raise ReportError(f"{path}: has no log_history. Give a trainer_state.json that TRL's trainer has written.")
    rows = _Rows()
    damaged = 0
    for entry in history:
        step = _step(entry) if isinstance(entry, dict) else None
        if step is None:
            damaged += 1
        else:
            # those of an evaluation begin with eval_, and the last entry sums up: neither has our names
            rows.log(step, _values(entry))
    left_out = (f"log_history: left out {counted(damaged, 'record')} without a step",) if damaged else ()
    return [log_of(rows, title=str(path), writer="TRL", remarks=(*left_out, *rows.remarks))]


# -- wandb -------------------------------------------------------------------------------------------------------------

#: Between the name of a run and that of a metric, in the head of a chart's column.
BETWEEN = " - "
#: A chart writes each curve three times, twice with these ends.
ENVELOPE = ("__MIN", "__MAX")
#: Characters of the longest cell: a table of samples among the columns.
_CELL = 10**7


def _table(path: Path, text: str) -> list[RunLog]:
    """The rows of one run, or of a chart with a column for each run."""
    csv.field_size_limit(_CELL)
    first = text.partition("\n")[0]
    try:
        lines = csv.reader(io.StringIO(text), delimiter=max(",\t;", key=first.count))
        head, *cells = [line for line in lines if line] or [[]]
    except csv.Error as error:
        raise ReportError(f"{path}: is not a table: {error}. Export it from wandb again.") from error
    if not set(STEPS) & set(head):
        raise ReportError(f"{path}: no column of steps. Export it with one of {', '.join(STEPS)}.")
    columns = [_column(name) for name in head]
    runs: dict[str, _Rows] = {}
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
            runs.setdefault(run, _Rows()).log(step, row)
    left_out = _left_out(damaged, "row without a step")
    logs = [
        log_of(rows, title=f"{path}: {run}" if run else str(path), writer="wandb", remarks=(*left_out, *rows.remarks))
        for run, rows in runs.items()
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


# -- rlstab ------------------------------------------------------------------------------------------------------------


def _own(path: Path) -> list[RunLog]:
    """Run folders, bench folders, results files."""
    runs, left_out = find_runs(path)
    logs = [_own_run(run) for run in runs]
    if left_out and logs:
        # what is left out belongs to no run; the first one tells it
        told = tuple(f"left out {item.path}: {item.why}" for item in left_out)
        logs[0] = replace(logs[0], remarks=(*logs[0].remarks, *told))
    return logs


def _own_run(run: RunRecord) -> RunLog:
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
        evaluations=run.evaluations,
        config=run.config,
        remarks=run.remarks,
    )


# -- tokens ------------------------------------------------------------------------------------------------------------


def _tokens(path: Path) -> list[RunLog]:
    """The export of another trainer: what each step says of its tokens becomes a row."""
    dump = read_dump(path)
    rows = {step.number: _row(step) for step in dump.steps}
    return [log_of(rows, title=str(path), writer="a token trace", remarks=tuple(dump.notes))]


def _row(step: Step) -> dict[str, float]:
    batch = step.batch
    gaps = (batch.logprobs - batch.old_logprobs).double()  # log of new over old
    values = {
        "tokens/entropy": batch.entropies,
        "response/length": step.tensors["lengths"],
        "reward/mean": step.tensors.get("rewards"),
        "ratio/clipped": step.tensors.get(f"{DID}trust_region/clipped"),
        "mismatch/k3": None if batch.live_ratio else torch.expm1(gaps) - gaps,
        "sampler/gap": None if batch.live_ratio else gaps.abs(),
    }
    finite = {name: column[column.isfinite()] for name, column in values.items() if column is not None}
    return {name: float(column.double().mean()) for name, column in finite.items() if column.numel()}
