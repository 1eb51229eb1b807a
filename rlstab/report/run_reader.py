"""Reads the folder of one run: of rlstab's trainer, or of another trainer whose command a bench ran."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstab.bins import EMPTY, MOST_ROLLOUTS, Curve, Run, in_bins, rounded, running_total
from rlstab.config.document import Document
from rlstab.errors import ReportError, reason
from rlstab.logs.source import read_logs
from rlstab.report.runs import LeftOut, RunRecord, Status, objective_names
from rlstab.run_files import ABOUT, CONFIG, METRICS, OUT
from rlstab.safe_read import MOST_NUMBER, as_float, as_step, gaps, read_bytes, read_mapping, read_object, readable


def read_folder(folder: Path, bench: Mapping[str, Any] | None = None) -> RunRecord | LeftOut:
    """One run.

    Args:
        folder: the folder of the run.
        bench: ``bench.json`` of the bench that it belongs to.
    """
    bench = bench or {}
    remarks: list[str] = []
    launched = is_launched(folder)
    config = _config(folder / CONFIG, remarks)
    record = _mapping(folder / "bench.json", remarks) if (folder / "bench.json").is_file() else {}
    about = {"run_hash": record.get("run_hash")} if launched else _mapping(folder / ABOUT, remarks)
    method = record["method"] if isinstance(record.get("method"), str) else "+".join(objective_names(config))
    if not method:
        return LeftOut(str(folder), "neither config.yaml nor bench.json says what was trained: " + "; ".join(remarks))
    status: Status | None = "failed" if record.get("status") == "failed" else None
    if launched:
        try:
            run = foreign(folder / OUT, folder / "worker.log")
        except ReportError as error:
            if status is None:
                return LeftOut(str(folder), str(error))
            run = Run(metrics={})
        ended = record.get("status") == "finished"
    else:
        run = _own(folder, config, remarks)
        ended = run.planned is not None and run.rollouts >= run.planned
        if not run.metrics and not run.evaluations and status is None:
            return LeftOut(str(folder), "no record of a rollout or evaluation: " + ("; ".join(remarks) or "empty"))
    seed = as_step(record.get("seed", config.get("seed")))
    if seed is None:
        remarks.append("no file says its seed; taken for seed 0")
    return record_of(
        run,
        folder,
        bench=_text(record.get("bench")) or _text(bench.get("name")),
        setting=_text(record.get("setting")) or "default",
        method=method,
        seed=seed or 0,
        status=status or ("finished" if ended else "unfinished"),
        error=_text(record.get("error")),
        config=config,
        about={**({"cpu": bench["cpu"]} if "cpu" in bench else {}), **about},
        command=_text(record.get("command")) or _text(about.get("command")),
        cpu_seconds=as_float(record.get("cpu_seconds")),
        seconds=as_float(record.get("seconds")),
        baseline=_text(bench.get("baseline")),
        bench_command=_text(bench.get("command")),
        bench_about=_text(bench.get("about")) or "",
        collapse=bench["collapse"] if isinstance(bench.get("collapse"), dict) else None,
        remarks=(*remarks, *run.remarks),
    )


def record_of(run: Run, folder: Path, **facts: Any) -> RunRecord:
    """The record of the run in a folder.

    Args:
        run: its curves.
        folder: the folder of the run.
        **facts: what it is; see :class:`rlstab.report.runs.RunFacts`.
    """
    curves = ("metrics", "evaluations", "largest", "spent", "unit", "writer", "not_finite")
    file = folder / METRICS
    written = (file if file.is_file() else folder).stat().st_mtime
    return RunRecord(**{name: getattr(run, name) for name in curves}, path=str(folder), written=written, **facts)


def foreign(folder: Path, console: Path) -> Run:
    """The run in the output folder of another trainer, or, if that has no log, in what the trainer printed.

    Raises:
        ReportError: neither has a known metric.
    """
    try:
        return read_logs(folder)[0]
    except ReportError:
        with suppress(ReportError):
            return read_logs(console)[0]
        raise


def is_launched(folder: Path) -> bool:
    """Whether a bench made the run by the command of another trainer."""
    return (folder / OUT).is_dir() and not (folder / METRICS).is_file()


def _own(folder: Path, config: Mapping[str, Any], remarks: list[str]) -> Run:
    """The run that rlstab's trainer wrote."""
    metrics, evaluations = _split(_records(folder / METRICS, remarks))
    seconds = metrics.pop("seconds/rollout", EMPTY)
    rollouts = max((int(curve[0][-1]) for curve in metrics.values()), default=0)
    spent = {"seconds": seconds, "tokens": metrics.get("response/tokens", EMPTY)}
    totals = {unit: running_total(curve, rollouts) for unit, curve in spent.items()}
    return Run(
        metrics=metrics,
        evaluations=evaluations,
        largest={name: in_bins(metrics[name], rollouts, largest=True) for name in metrics if "/largest" in name},
        spent={unit: total for unit, total in totals.items() if total is not None},
        config=config,
    )


def _mapping(path: Path, remarks: list[str], parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    data, fault = read_mapping(path, parse)
    remarks += [fault] if data is None else []
    return data or {}


def _config(path: Path, remarks: list[str]) -> dict[str, Any]:
    data = _mapping(path, remarks, lambda text: Document.parse(text, path.name).data)
    objective = data.get("objective", [])
    if isinstance(objective, list) and all(isinstance(item, Mapping) for item in objective):
        return data
    remarks.append(f"objective in {path.name} is not a list of methods")
    return {}


def _records(path: Path, remarks: list[str]) -> dict[int, dict[str, Any]]:
    """Records by rollout. A run that was continued may have written one twice; the later one counts."""
    try:
        *lines, rest = read_bytes(path).split(b"\n")
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        remarks.append(f"{path.name} is missing" if missing else f"{path.name} cannot be read: {reason(error)}")
        return {}
    if rest.strip():
        remarks.append(f"the last line of {path.name} is cut off")
    records: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in filter(bytes.strip, lines):
        record = read_object(line)
        rollout = record.get("rollout")
        if isinstance(rollout, int) and not isinstance(rollout, bool) and 0 <= rollout <= MOST_ROLLOUTS:
            if not line.isascii() or b"\\u" in line:
                record = {readable(name): value for name, value in record.items()}
            records[rollout] = {**records[rollout], **record} if rollout in records else record
        else:
            damaged += 1
    if damaged:
        remarks.append(f"{damaged} damaged line{'s' * (damaged > 1)} of {path.name}")
    if absent := gaps({0, *records}, 1):
        remarks.append(f"{path.name} lacks rollout {absent}")
    return dict(sorted(records.items()))


def _split(records: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Curve], list[dict[str, float]]]:
    """Curves, with the seconds of each rollout, and evaluations."""
    steps = np.array(list(records), np.int64)
    grids: dict[bytes, NDArray[np.int64]] = {}  # most metrics share one
    metrics: dict[str, Curve] = {}
    evaluations: dict[int, dict[str, float]] = {}
    for name in sorted(set[str]().union(*records.values()) - {"rollout"}):
        # a count is written only if there was something to count
        missing = 0.0 if name.startswith("optimizer_steps/") else None
        has_value, values = _numbers([record.get(name, missing) for record in records.values()])
        if name.startswith("eval/"):
            for rollout, value in zip(steps[has_value].tolist(), values[has_value].tolist(), strict=True):
                if math.isfinite(value):
                    evaluations.setdefault(rollout, {"rollout": rollout})[name] = rounded(value)
        elif name == "seconds/rollout" or not name.startswith("seconds/"):
            has_value &= steps > 0
            if has_value.any():
                metrics[name] = grids.setdefault(has_value.tobytes(), steps[has_value]), values[has_value]
    return metrics, [evaluations[rollout] for rollout in sorted(evaluations)]


def _numbers(column: Sequence[Any]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """The records in which a metric has a number, and the numbers; see :func:`rlstab.safe_read.as_float`."""
    if set(map(type, column)) <= {float, type(None)}:
        values = np.array(column, np.float64)
        large = np.abs(values) > MOST_NUMBER
        return np.array([value is not None for value in column]), np.where(large, np.copysign(np.inf, values), values)
    numbers = list(map(as_float, column))
    return np.array([number is not None for number in numbers]), np.array(numbers, np.float64)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
