"""From a path to the runs that were logged there, whoever wrote them.

Logs of rlstab, ``trainer_state.json`` of transformers (TRL), verl's file logger and other JSON lines, a CSV exported
from wandb, and token exports of prime-rl. Damaged lines are left out and counted.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlstab.diagnose.metric_aliases import known
from rlstab.diagnose.run_log import RunLog, log_of
from rlstab.errors import ReportError
from rlstab.files import exists, is_dir, reason
from rlstab.record import Step, read_dump
from rlstab.record.foreign import exports
from rlstab.record.step import DID
from rlstab.report.formatting import counted, ranges
from rlstab.report.load import find_runs
from rlstab.report.runs import RunRecord
from rlstab.safe_read import as_float, read_bytes, read_object

#: In every checkpoint of transformers, and in the output folder where the trainer was asked to save it.
STATE = "trainer_state.json"
#: What can be read, for errors.
READABLE = (
    f"a run folder or results file of rlstab, {STATE} or an output folder of TRL, a file of verl's file logger "
    f"(.jsonl), a CSV exported from wandb, or token exports of prime-rl"
)
#: What trainers and trackers call the number of a step, the likeliest first: wandb's own count is of calls to its log.
STEPS = ("rollout", "train/global_step", "global_step", "training/global_step", "step", "Step", "_step")
#: Lines in which one that tells the writer is looked for: the first may be damaged.
SNIFFED = 20

Rows = dict[int, dict[str, float]]


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
    if not path.is_file():
        raise ReportError(f"{path}: is not an ordinary file. Give {READABLE}.")
    if path.suffix.lower() in (".csv", ".tsv"):
        return _table(path)
    if path.suffix.lower() == ".json":
        return _trainer_state(path)
    return _reader(path)(path)


def _folder(path: Path) -> list[RunLog]:
    # the state of an output folder, else that of the last checkpoint: each holds the whole history until then
    states = [path / STATE] if (path / STATE).is_file() else list(path.glob(f"checkpoint-*/{STATE}"))
    if states:
        return _trainer_state(max(states, key=lambda state: _number_of(state.parent.name)))
    if exports(path):
        return _tokens(path)
    try:
        return _own(path)
    except ReportError as error:
        raise ReportError(f"{path}: no log in it. Give {READABLE}.") from error


def _number_of(checkpoint: str) -> int:
    """Of a checkpoint, by the name of its folder; 0 without one."""
    digits = checkpoint.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _reader(path: Path) -> Callable[[Path], list[RunLog]]:
    """What reads a file of JSON lines: results of benches, tokens, or rows of metrics."""
    for _, data in zip(range(SNIFFED), map(read_object, _read(path).split(b"\n", SNIFFED)), strict=False):
        if data:
            if "curves" in data and "format" in data:
                return _own
            is_trace = "token_ids" in data or ("tokens" in data and "sequence_id" in data)
            return _tokens if is_trace else _json_lines
    return _json_lines


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {reason(error)}. Give a file that you may read.") from error


def _values(data: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row; what was there and not finite is NaN, and JSON's null is what writers of NaN mean by it."""
    values = {name: math.nan if value is None else as_float(value) for name, value in data.items()}
    return {name: value for name, value in values.items() if value is not None}


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# -- JSON lines --------------------------------------------------------------------------------------------------------


def _json_lines(path: Path) -> list[RunLog]:
    """The values beside the step, or under ``data``, where verl's file logger has them."""
    rows: Rows = {}
    damaged: list[int] = []
    verl = own = False
    for number, line in enumerate(_read(path).split(b"\n"), 1):
        if not line.strip():
            continue
        data = read_object(line)
        step = next((data[name] for name in STEPS if _is_step(data.get(name))), None)
        if step is None:
            damaged.append(number)
            continue
        own |= "rollout" in data
        if isinstance(data.get("data"), dict):
            verl, data = True, data["data"]
        rows.setdefault(step, {}).update(_values(data))
    if not any(known(row) for row in rows.values()):
        raise ReportError(
            f"{path}: no line in it has a step and a metric that is known here. Give a file whose lines are those of "
            f"verl's file logger, or objects with a step and metrics named as in TRL, verl or rlstab."
        )
    remarks = (f"left out {counted(len(damaged), 'damaged line')}: {ranges(damaged)}",) if damaged else ()
    writer = "verl" if verl else "rlstab" if own else "JSON lines"
    return [log_of(rows, title=str(path), writer=writer, unit="rollout" if own else "step", remarks=remarks)]


# -- transformers ------------------------------------------------------------------------------------------------------


def _trainer_state(path: Path) -> list[RunLog]:
    try:
        state = json.loads(_read(path).decode("utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: is not JSON: {reason(error)}. Give that of a whole checkpoint.") from error
    history = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(history, list):
        raise ReportError(f"{path}: has no log_history. Give a trainer_state.json that TRL's trainer has written.")
    rows: Rows = {}
    entries = [entry for entry in history if isinstance(entry, dict) and _is_step(entry.get("step"))]
    for entry in entries:
        # those of an evaluation begin with eval_, and the last entry sums up: neither has our names
        rows.setdefault(entry["step"], {}).update(_values({k: value for k, value in entry.items() if k != "step"}))
    damaged = len(history) - len(entries)
    remarks = (f"log_history: left out {counted(damaged, 'record')} without a step",) if damaged else ()
    return [log_of(rows, title=str(path), writer="TRL", remarks=remarks)]


# -- wandb -------------------------------------------------------------------------------------------------------------

#: Between the name of a run and that of a metric, in the head of a chart's column.
BETWEEN = " - "
#: A chart writes each curve three times, twice with these ends.
ENVELOPE = ("__MIN", "__MAX")


def _table(path: Path) -> list[RunLog]:
    """The rows of one run, or of a chart with a column for each run."""
    text = _read(path).decode("utf-8-sig", errors="replace")
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
    runs: dict[str, Rows] = {}
    damaged: list[int] = []
    for number, line in enumerate(cells, 2):
        step = _cell(line[place]) if len(line) > place else None
        if step is None or not step.is_integer():
            damaged.append(number)
            continue
        for (run, metric), cell in zip(columns, line, strict=False):
            value = _cell(cell)
            if metric and value is not None:
                runs.setdefault(run, {}).setdefault(int(step), {})[metric] = value
    remarks = (f"left out {counted(len(damaged), 'row')} without a step: {ranges(damaged)}",) if damaged else ()
    logs = [
        log_of(rows, title=f"{path}: {run}" if run else str(path), writer="wandb", remarks=remarks)
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


def _cell(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
    rows: Rows = {}
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


# -- tokens ------------------------------------------------------------------------------------------------------------


def _tokens(path: Path) -> list[RunLog]:
    """The export of another trainer: what each step says of its tokens becomes a row."""
    dump = read_dump(path)
    # prime-rl counts its steps from 0
    shift = 1 if any(step.number == 0 for step in dump.steps) else 0
    rows = {step.number + shift: _row(step) for step in dump.steps}
    notes = [*dump.notes, *(["its steps begin at 0 and are counted from 1 here"] if shift else [])]
    return [log_of(rows, title=str(path), writer="a token trace", remarks=tuple(notes))]


def _row(step: Step) -> dict[str, float]:
    batch = step.batch
    # log of new over old; there is none where the trainer did not write down its own log-probs
    gaps = (batch.logprobs - batch.old_logprobs).double()
    values = {
        "tokens/entropy": batch.entropies,
        "response/length": step.tensors["lengths"],
        "reward/mean": step.tensors.get("rewards"),
        "ratio/clipped": step.tensors.get(f"{DID}trust_region/clipped"),
        "mismatch/k3": torch.expm1(gaps) - gaps,
        "sampler/gap": gaps.abs(),
    }
    finite = {name: of[of.isfinite()] for name, of in values.items() if of is not None}
    return {name: float(of.double().mean()) for name, of in finite.items() if of.numel()}
