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
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlstab.errors import ReportError
from rlstab.files import is_foreign
from rlstab.report.formatting import ranges
from rlstab.report.runs import MOST_ROLLOUTS, WIDTH, Curve, LeftOut, Loaded, RunRecord, Status, binned, rounded
from rlstab.report.safe_read import plain, read_bytes

FORMAT = 2


class _Shared(BaseModel):
    """What a line says of a run as :class:`RunRecord` does; keys that this version does not know are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")
    bench: str | None
    setting: str
    method: str
    seed: int
    status: Status
    error: str | None
    baseline: str | None
    bench_command: str | None
    bench_about: str
    config: dict[str, Any]
    about: dict[str, Any]
    command: str | None
    seconds: float | None
    cpu_seconds: float | None
    seconds_by_phase: dict[str, float]


class _Curves(BaseModel):
    """``width`` and ``rollout``, and beside them one list per metric, null where a bin has none."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, list[float | None]]
    width: int = Field(ge=1)
    rollout: list[int]

    @model_validator(mode="after")
    def _rising(self) -> _Curves:
        if any(later <= earlier for earlier, later in pairwise([0, *self.rollout])):
            raise ValueError("curves.rollout does not rise from 1 on")
        if self.rollout and self.rollout[-1] > MOST_ROLLOUTS:
            raise ValueError(f"curves.rollout goes beyond {MOST_ROLLOUTS} rollouts")
        return self


class _Line(_Shared):
    """One run."""

    format: Literal[2]
    evaluations: list[dict[str, int | float | None]]
    curves: _Curves
    largest: dict[str, list[float | None]]
    spent: dict[str, list[float | None]]
    left_out: list[str]


def export_results(loaded: Loaded, path: str | Path) -> Path:
    """Write the runs as a results file, which :func:`rlstab.report.load.load_runs` reads to equal statistics.

    Raises:
        ReportError: the file cannot be written.
    """
    path = Path(path)
    text = "".join(json.dumps(_line(run), allow_nan=False) + "\n" for run in loaded.runs)
    try:
        if is_foreign(path, b'{"format": '):
            raise ReportError(f"{path} exists, is not a results file, and stays as it is. Give --export another file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportError(f"{path}: cannot be written: {error.strerror}. Give --export another file.") from error
    return path


def _line(run: RunRecord) -> dict[str, Any]:
    curves = {name: binned(run, name) for name in sorted(run.metrics)}
    rollouts = sorted({int(rollout) for ends, _ in curves.values() for rollout in ends})
    shared = {name: getattr(run, name) for name in _Shared.model_fields} | {"about": _without_places(run.about)}
    return {
        "format": FORMAT,
        **plain(shared),
        "evaluations": plain(run.evaluations),
        "curves": {
            "width": run.bin_width if run.bin_width > 1 else WIDTH,
            "rollout": rollouts,
            **{name: _aligned(curve, rollouts) for name, curve in curves.items()},
        },
        "largest": {name: _aligned(curve, rollouts) for name, curve in sorted(run.largest.items())},
        "spent": {unit: _aligned(curve, rollouts) for unit, curve in sorted(run.spent.items())},
        "left_out": list(run.remarks),
    }


def _without_places(about: Mapping[str, Any]) -> dict[str, Any]:
    """What ``run.json`` says, without places on the machine: the command of a worker, the folders of reward files."""
    shown = {name: value for name, value in about.items() if name != "command"}
    if isinstance(rewards := shown.get("rewards"), Mapping):
        shown["rewards"] = {name: re.split(r"[/\\]", str(place))[-1] for name, place in rewards.items()}
    return shown


def _aligned(curve: Curve, rollouts: list[int]) -> list[float | None]:
    values = {int(end): rounded(float(value)) for end, value in zip(*curve, strict=True) if math.isfinite(value)}
    return [values.get(end) for end in rollouts]


def read_results(path: Path) -> list[RunRecord | LeftOut]:
    """The runs of a results file; other lines are left out with the reason, once for all that share it."""
    records: list[RunRecord | LeftOut] = []
    damaged: dict[str, list[int]] = {}
    try:
        lines = read_bytes(path).decode("utf-8", errors="replace").split("\n")
    except OSError as error:
        return [LeftOut(str(path), f"cannot be read: {error.strerror or error}")]
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                records.append(_record(_Line.model_validate_json(line), f"{path}:{number}"))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"]))
                damaged.setdefault(f"{where}: {first['msg']}" if where else first["msg"], []).append(number)
            except ValueError as error:
                damaged.setdefault(str(error), []).append(number)
    records += [
        LeftOut(f"{path}:{ranges(numbers)}", f"not a line of a results file: {why}") for why, numbers in damaged.items()
    ]
    return records or [LeftOut(str(path), "empty")]


def _record(line: _Line, place: str) -> RunRecord:
    rollouts = np.array(line.curves.rollout, dtype=np.int64)
    return RunRecord(
        **{name: getattr(line, name) for name in _Shared.model_fields},
        path=place,
        evaluations=[{key: value for key, value in record.items() if value is not None} for record in line.evaluations],
        metrics={name: _curve(rollouts, values) for name, values in line.curves.__pydantic_extra__.items()},
        bin_width=line.curves.width,
        largest={name: _curve(rollouts, values) for name, values in line.largest.items()},
        spent={unit: _curve(rollouts, values) for unit, values in line.spent.items()},
        remarks=tuple(line.left_out),
    )


def _curve(rollouts: NDArray[np.int64], values: list[float | None]) -> Curve:
    if len(values) != len(rollouts):
        raise ValueError(f"a curve has {len(values)} values for {len(rollouts)} rollouts")
    numbers = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    known = np.isfinite(numbers)
    return rollouts[known], numbers[known]
