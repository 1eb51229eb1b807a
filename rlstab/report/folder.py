"""A run folder, as ``rlstab train`` and ``rlstab bench`` leave it, to a record: whatever state it is in."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstab.config.document import Document
from rlstab.report.bins import EMPTY, highest, running_total
from rlstab.report.model import (
    MOST_ROLLOUTS,
    Curve,
    LeftOut,
    RunRecord,
    Status,
    objective_names,
    rounded,
    setting_of,
)
from rlstab.report.plain import plain, read_bytes, read_text, readable

#: Any of them makes a folder a run folder.
FILES = ("metrics.jsonl", "config.yaml", "run.json")


def is_run(folder: Path) -> bool:
    """Whether a folder holds one run: by its own files, or by what a bench wrote about a run that never began."""
    return any((folder / name).is_file() for name in FILES) or "seed" in (read_json(folder / "bench.json")[0] or {})


def read_folder(folder: Path, bench: Mapping[str, Any] | None = None) -> RunRecord | LeftOut:
    """One run.

    Args:
        folder: of the run.
        bench: ``bench.json`` of the bench that it belongs to.
    """
    whole = bench or {}
    remarks: list[str] = []
    config = _config(folder / "config.yaml", remarks)
    about = _json(folder / "run.json", remarks)
    place = _json(folder / "bench.json", remarks) if (folder / "bench.json").is_file() else {}
    records = _lines(folder / "metrics.jsonl", remarks)
    named = isinstance(place.get("method"), str)
    method = place["method"] if named else "+".join(objective_names(config))
    if not method:
        return LeftOut(str(folder), "neither config.yaml nor bench.json says what was trained: " + "; ".join(remarks))
    failed = place.get("status") == "failed"
    if not records and not failed:
        return LeftOut(str(folder), "no record of a rollout or evaluation: " + ("; ".join(remarks) or "empty"))
    metrics, evaluations, seconds, took = _split(records)
    rollouts = max((int(one[-1]) for one, _ in metrics.values()), default=0)
    spent = {
        "seconds": running_total(took, rollouts),
        "tokens": running_total(metrics.get("response/tokens", EMPTY), rollouts),
    }
    planned = setting_of(config, "optimisation.rollouts")
    status: Status = "failed" if failed else "finished"
    if not failed and (not isinstance(planned, int) or rollouts < planned):
        status = "unfinished"
    seeds = [one for one in (place.get("seed"), config.get("seed")) if isinstance(one, int)]
    if not seeds:
        remarks.append("no file says its seed; taken for seed 0")
    return RunRecord(
        bench=_text(place.get("bench")) or _text(whole.get("name")),
        setting=_text(place.get("setting")) or "default",
        method=method,
        seed=seeds[0] if seeds else 0,
        status=status,
        error=_text(place.get("error")),
        path=str(folder),
        config=config,
        about={**({"cpu": whole["cpu"]} if "cpu" in whole else {}), **about},
        command=_text(place.get("command")) or _text(about.get("command")),
        cpu_seconds=_number(place.get("cpu_seconds")),
        seconds=_number(place.get("seconds")),
        evaluations=evaluations,
        metrics=metrics,
        largest={
            name: highest(curve, rollouts)
            for name, curve in metrics.items()
            if name.rpartition("/")[2].startswith("largest")
        },
        spent={unit: one for unit, one in spent.items() if one is not None},
        seconds_by_phase=seconds,
        baseline=_text(whole.get("baseline", whole.get("base"))),  # the second is what it was called before
        bench_command=_text(whole.get("command")),
        bench_about=_text(whole.get("about")) or "",
        remarks=tuple(remarks),
    )


def read_json(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The mapping in a JSON file, or None with the reason."""
    try:
        data = plain(json.loads(read_text(path)))
    except FileNotFoundError:
        return None, f"{path.name} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{path.name} cannot be read: {_first(error)}"
    return (data, "") if isinstance(data, dict) else (None, f"{path.name} is not a mapping")


def _json(path: Path, remarks: list[str]) -> dict[str, Any]:
    data, why = read_json(path)
    if data is None:
        remarks.append(why)
    return data or {}


def _config(path: Path, remarks: list[str]) -> dict[str, Any]:
    try:
        # without aliases that contain themselves or unfold without end
        data = plain(Document.parse(read_text(path), path.name).data)
    except FileNotFoundError:
        remarks.append(f"{path.name} is missing")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        remarks.append(f"{path.name} cannot be read: {_first(error)}")
        return {}
    if not isinstance(data, dict):
        remarks.append(f"{path.name} is not a mapping")
        return {}
    objective = data.get("objective", [])
    if not isinstance(objective, list) or not all(isinstance(one, Mapping) for one in objective):
        remarks.append(f"objective in {path.name} is not a list of methods")
        return {}
    return data


def _lines(path: Path, remarks: list[str]) -> dict[int, dict[str, Any]]:
    """Records by rollout. A run that was continued may have written one twice; the later one counts."""
    try:
        text = read_bytes(path).decode("utf-8", errors="replace")
    except FileNotFoundError:
        remarks.append(f"{path.name} is missing")
        return {}
    except OSError as error:
        remarks.append(f"{path.name} cannot be read: {_first(error)}")
        return {}
    *lines, rest = text.split("\n")
    if rest.strip():
        remarks.append(f"the last line of {path.name} is cut off")
    found: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # also an integer of thousands of digits
            record = None
        record = record if isinstance(record, dict) else {}
        record = {readable(name): value for name, value in record.items()}
        rollout = record.get("rollout")
        if isinstance(rollout, int) and not isinstance(rollout, bool) and 0 <= rollout <= MOST_ROLLOUTS:
            found.setdefault(rollout, {}).update(record)
        else:
            damaged += 1
    if damaged:
        remarks.append(f"{damaged} damaged line{'s' * (damaged > 1)} of {path.name}")
    return dict(sorted(found.items()))


def _split(
    records: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[str, Curve], list[dict[str, float]], dict[str, float], Curve]:
    """Curves, evaluations, mean seconds by phase, and the seconds of each rollout."""
    counted = {name for record in records.values() for name in record if name.startswith("optimizer_steps/")}
    points: dict[str, list[tuple[int, float]]] = {}
    seconds: dict[str, list[float]] = {}
    took: list[tuple[int, float]] = []
    evaluations: list[dict[str, float]] = []
    for rollout, record in records.items():
        evaluation: dict[str, float] = {}
        # a count is written only where there was something to count
        for name, raw in {**dict.fromkeys(counted, 0), **record}.items():
            value = _number(raw)
            if name == "rollout" or value is None:
                continue
            if name.startswith("eval/"):
                evaluation[name] = rounded(value)
            elif name.startswith("seconds/"):
                seconds.setdefault(name, []).append(value)
                took += [(rollout, value)] if rollout and name == "seconds/rollout" else []
            elif rollout:
                points.setdefault(name, []).append((rollout, value))
        if evaluation:
            evaluations.append({"rollout": rollout, **evaluation})
    curves = {name: _curve(one) for name, one in points.items()}
    phases = {name: rounded(math.fsum(one) / len(one)) for name, one in seconds.items()}
    return curves, evaluations, phases, _curve(took)


def _curve(points: Sequence[tuple[int, float]]) -> Curve:
    rollouts, values = zip(*points, strict=True) if points else ((), ())
    return np.array(rollouts, np.int64), np.array(values, np.float64)


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if isinstance(value, float) or abs(value) < 10**300 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _first(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
