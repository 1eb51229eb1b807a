"""Results files: one JSON line per run, small enough to commit, complete enough to make every statistic again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlstab.errors import ReportError
from rlstab.files import is_foreign
from rlstab.report.bins import binned
from rlstab.report.model import MOST_ROLLOUTS, WIDTH, Curve, LeftOut, Loaded, RunRecord, Status, rounded
from rlstab.report.numbers import ranges
from rlstab.report.plain import read_bytes

FORMAT = 2


def export_results(loaded: Loaded, path: str | Path) -> Path:
    """Write the runs as a results file, which :func:`rlstab.report.records.load_runs` reads to equal statistics.

    Raises:
        ReportError: the file cannot be written.
    """
    path = Path(path)
    text = "".join(json.dumps(_line(run), allow_nan=False) + "\n" for run in loaded.runs)
    try:
        if is_foreign(path, b'{"format": '):
            raise ReportError(f"{path} exists, is no results file, and stays as it is. Give --export another file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path}: cannot be written: {error.strerror}. Give --export another file.") from error
    return path


def read_results(path: Path) -> list[RunRecord | LeftOut]:
    """The runs of a results file; lines that are none are left out with the reason, once for all that share it."""
    found: list[RunRecord | LeftOut] = []
    damaged: dict[str, list[int]] = {}
    try:
        lines = read_bytes(path).decode("utf-8", errors="replace").split("\n")
    except OSError as error:
        return [LeftOut(str(path), f"cannot be read: {error.strerror or error}")]
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(_record(_Line.model_validate_json(line), f"{path}:{number}"))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = "".join(f"{part}." for part in first["loc"]).rstrip(".")
                damaged.setdefault(f"{where}: {first['msg']}" if where else first["msg"], []).append(number)
            except ValueError as error:
                damaged.setdefault(str(error), []).append(number)
    found += [
        LeftOut(f"{path}:{ranges(numbers)}", f"not a line of a results file: {why}") for why, numbers in damaged.items()
    ]
    return found or [LeftOut(str(path), "empty")]


def _without_places(about: Mapping[str, Any]) -> dict[str, Any]:
    """What ``run.json`` says, without places on the machine: the command of a worker, the folders of reward files."""
    found = {name: value for name, value in about.items() if name != "command"}
    if isinstance(rewards := found.get("rewards"), Mapping):
        found["rewards"] = {name: re.split(r"[/\\]", str(one))[-1] for name, one in rewards.items()}
    return found


def _line(run: RunRecord) -> dict[str, Any]:
    curves = {name: binned(run, name) for name in sorted(run.metrics)}
    rollouts = sorted({int(rollout) for one, _ in curves.values() for rollout in one})
    return {
        "format": FORMAT,
        "bench": run.bench,
        "setting": run.setting,
        "method": run.method,
        "seed": run.seed,
        "status": run.status,
        "error": run.error,
        "baseline": run.baseline,
        "bench_command": run.bench_command,
        "bench_about": run.bench_about,
        "run_hash": _plain(run.about.get("run_hash")),
        "objective_hash": _plain(run.about.get("objective_hash")),
        "config": _plain(run.config),
        "about": _plain(_without_places(run.about)),
        "command": run.command,
        "seconds": _plain(run.seconds),
        "cpu_seconds": _plain(run.cpu_seconds),
        "seconds_by_phase": _plain(run.seconds_by_phase),
        "evaluations": _plain(run.evaluations),
        "curves": {
            "width": run.bin_width if run.bin_width > 1 else WIDTH,
            "rollout": rollouts,
            **{name: _aligned(curve, rollouts) for name, curve in curves.items()},
        },
        "largest": {name: _aligned(curve, rollouts) for name, curve in sorted(run.largest.items())},
        "spent": {unit: _aligned(curve, rollouts) for unit, curve in sorted(run.spent.items())},
        "left_out": list(run.remarks),
    }


def _aligned(curve: Curve, rollouts: list[int]) -> list[float | None]:
    values = {int(place): rounded(float(value)) for place, value in zip(*curve, strict=True) if math.isfinite(value)}
    return [values.get(place) for place in rollouts]


def _plain(data: Any) -> Any:
    """Without what JSON does not have: NaN and Inf become null. Floats keep 6 significant digits, settings all."""
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    return data if data is None or isinstance(data, str | int | bool) else str(data)


class _Curves(BaseModel):
    """``width`` and ``rollout``, and beside them one list per metric, null where a bin has none."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, list[float | None]]
    width: int = Field(ge=1)
    # here and below, the second name is that of format 1
    rollout: list[int] = Field(validation_alias=AliasChoices("rollout", "step"))

    @model_validator(mode="after")
    def _fit(self) -> _Curves:
        if any(later <= one for one, later in pairwise([0, *self.rollout])):
            raise ValueError("curves.rollout does not rise from 1 on")
        if self.rollout and self.rollout[-1] > MOST_ROLLOUTS:
            raise ValueError(f"curves.rollout goes beyond {MOST_ROLLOUTS} rollouts")
        return self


class _Line(BaseModel):
    """One run; keys that this version does not know are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")
    format: Literal[1, 2]
    bench: str | None
    setting: str
    method: str
    seed: int
    status: Status
    error: str | None
    baseline: str | None = Field(None, validation_alias=AliasChoices("baseline", "base"))
    bench_command: str | None = None
    bench_about: str = ""
    config: dict[str, Any]
    about: dict[str, Any]
    command: str | None
    seconds: float | None
    cpu_seconds: float | None
    seconds_by_phase: dict[str, float]
    evaluations: list[dict[str, int | float | None]]
    curves: _Curves
    largest: dict[str, list[float | None]]
    spent: dict[str, list[float | None]] = {}
    left_out: list[str]


def _record(line: _Line, place: str) -> RunRecord:
    rollouts = np.array(line.curves.rollout, dtype=np.int64)
    return RunRecord(
        bench=line.bench,
        setting=line.setting,
        method=line.method,
        seed=line.seed,
        status=line.status,
        error=line.error,
        path=place,
        config=line.config,
        about=line.about,
        command=line.command,
        cpu_seconds=line.cpu_seconds,
        seconds=line.seconds,
        evaluations=[{key: value for key, value in one.items() if value is not None} for one in line.evaluations],
        metrics={name: _curve(rollouts, one) for name, one in line.curves.__pydantic_extra__.items()},
        bin_width=line.curves.width,
        largest={name: _curve(rollouts, one) for name, one in line.largest.items()},
        spent={unit: _curve(rollouts, one) for unit, one in line.spent.items()},
        seconds_by_phase=line.seconds_by_phase,
        baseline=line.baseline,
        bench_command=line.bench_command,
        bench_about=line.bench_about,
        remarks=tuple(line.left_out),
    )


def _curve(rollouts: NDArray[np.int64], values: list[float | None]) -> Curve:
    if len(values) != len(rollouts):
        raise ValueError(f"a curve has {len(values)} values for {len(rollouts)} rollouts")
    found = np.array([math.nan if one is None else one for one in values], dtype=np.float64)
    known = np.isfinite(found)
    return rollouts[known], found[known]
