"""Results files: one JSON line per run, small enough to commit, complete enough to make every statistic again."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from rlstab.bins import MOST_ROLLOUTS, WIDTH, Curve, binned, rounded
from rlstab.console import ranges
from rlstab.report.output import refuse_foreign, write_text
from rlstab.report.runs import LeftOut, Loaded, RunFacts, RunRecord
from rlstab.safe_read import MOST_NUMBER, plain, read_bytes
from rlstab.signs import counted_signs

FORMAT = 2


class _Curves(BaseModel):
    """``width`` and ``rollout``, and one list per metric, null where a bin has none."""

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


@dataclass(config=ConfigDict(strict=True, extra="ignore"), frozen=True, kw_only=True)
class _Line(RunFacts):
    """One run; keys that this version does not know are ignored."""

    format: Literal[2]
    evaluations: list[dict[str, int | float | None]]
    curves: _Curves
    largest: dict[str, list[float | None]]
    spent: dict[str, list[float | None]]
    left_out: list[str]
    not_finite: list[str] = Field(default_factory=list)


_LINE = TypeAdapter(_Line)
_FACTS = tuple(fact.name for fact in fields(RunFacts))


def export_results(loaded: Loaded, path: str | Path) -> Path:
    """Write the runs as a results file, which :func:`rlstab.report.load.load_runs` reads to equal statistics.

    Raises:
        ReportError: the file cannot be written.
    """
    text = "".join(json.dumps(_line(run), allow_nan=False) + "\n" for run in loaded.runs)
    refuse_foreign(Path(path), [b'{"format": '], "a results file", "--export")
    return write_text(Path(path), text, "--export")


def _line(run: RunRecord) -> dict[str, Any]:
    curves = {name: binned(run, name) for name in sorted(run.metrics)}
    rollouts = sorted({int(rollout) for ends, _ in curves.values() for rollout in ends})
    judged = {name: asdict(sign) for name, sign in counted_signs(run).items()}
    # without paths of the machine: a worker's command, the folders of reward files
    about = {name: value for name, value in run.about.items() if name != "command"}
    if isinstance(rewards := about.get("rewards"), Mapping):
        about["rewards"] = {name: re.split(r"[/\\]", str(path))[-1] for name, path in rewards.items()}
    shared = {name: getattr(run, name) for name in _FACTS} | {"about": about, "judged": judged}
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
        **({"not_finite": list(run.not_finite)} if run.not_finite else {}),
    }


def _aligned(curve: Curve, rollouts: list[int]) -> list[float | None]:
    values = {int(end): rounded(float(value)) for end, value in zip(*curve, strict=True) if math.isfinite(value)}
    return [values.get(end) for end in rollouts]


def read_results(path: Path) -> list[RunRecord | LeftOut]:
    """The runs of a results file; other lines are left out, with each reason given once."""
    records: list[RunRecord | LeftOut] = []
    damaged: dict[str, list[int]] = {}
    try:
        lines = read_bytes(path).decode("utf-8", errors="replace").split("\n")
    except OSError as error:
        return [LeftOut(str(path), f"cannot be read: {error.strerror or error}")]
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                records.append(_record(_LINE.validate_json(line), path, number))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"]))
                damaged.setdefault(f"{where}: {first['msg']}" if where else first["msg"], []).append(number)
            except ValueError as error:
                damaged.setdefault(str(error), []).append(number)
    records += [
        LeftOut(f"{path}:{ranges(numbers)}", f"not a line of a results file: {reason}")
        for reason, numbers in damaged.items()
    ]
    return records or [LeftOut(str(path), "empty")]


def _record(line: _Line, path: Path, number: int) -> RunRecord:
    rollouts = np.array(line.curves.rollout, dtype=np.int64)
    return RunRecord(
        **{name: getattr(line, name) for name in _FACTS},
        path=f"{path}:{number}",
        written=path.stat().st_mtime,
        evaluations=[
            {key: value for key, value in record.items() if value is not None and abs(value) <= MOST_NUMBER}
            for record in line.evaluations
        ],
        metrics={name: _curve(rollouts, values) for name, values in line.curves.__pydantic_extra__.items()},
        bin_width=line.curves.width,
        largest={name: _curve(rollouts, values) for name, values in line.largest.items()},
        spent={unit: _curve(rollouts, values) for unit, values in line.spent.items()},
        remarks=tuple(line.left_out),
        not_finite=tuple(line.not_finite),
    )


def _curve(rollouts: NDArray[np.int64], values: list[float | None]) -> Curve:
    if len(values) != len(rollouts):
        raise ValueError(f"a curve has {len(values)} values for {len(rollouts)} rollouts")
    numbers = np.array([math.nan if value is None else value for value in values], dtype=np.float64)
    finite = np.abs(numbers) <= MOST_NUMBER
    return rollouts[finite], numbers[finite]
