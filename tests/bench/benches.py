"""Small benches that tests load and run, and workers that only pretend to train."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlstab.bench import pool

#: Writes what a run of this length would, without a model.
PRETEND = """
import json, os, pathlib, sys, time
order = json.loads(sys.stdin.readline())
folder = pathlib.Path(order["run"]["tracking"]["out"])
kind = folder.parent.name
if kind == "hang":
    sys.stdin.read()
    sys.exit(3)
if kind == "die":
    print("about to die", file=sys.stderr, flush=True)
    sys.exit(7)
with (folder / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"rollout": 1, "reward/mean": 0.5, "tokens/entropy": 0.25, "seconds/rollout": 0.1}) + "\\n")
record = json.loads((folder / "bench.json").read_text())
status, error = ("failed", "ValueError: bad luck") if kind == "fail" else ("finished", None)
before = order["cpu_seconds"]
record |= {"status": status, "error": error, "seconds": 2.0, "cpu_seconds": None if before is None else before + 1.0}
(folder / "bench.json").write_text(json.dumps(record))
(folder / "resumed").write_text(str(order["resume"]))
(folder / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
"""


def tiny(out: Path, methods: Any, **more: Any) -> dict[str, Any]:
    """A bench of runs of two rollouts of 16 responses."""
    base = {
        "rollout": {"prompts": 4, "group": 4, "max_new_tokens": 8},
        "optimisation": {"rollouts": 2, "lr": 1e-3},
        "evaluation": {"every": 0},
    }
    return {"name": "tiny", "out": str(out), "base": base, "methods": methods, "seeds": 1, "workers": 2, **more}


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers pretend; a method called ``fail``, ``die`` or ``hang`` does so."""
    monkeypatch.setattr(pool, "COMMAND", [sys.executable, "-c", PRETEND])
    monkeypatch.setattr("rlstab.bench.schedule.POLL", 0.02)


def console() -> Console:
    """One that is no terminal and keeps what is printed."""
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def printed(where: Console) -> str:
    """What was printed."""
    file = where.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def record(out: Path, name: str) -> dict[str, Any]:
    """The ``bench.json`` of a run."""
    found = json.loads((out / "runs" / name / "bench.json").read_text())
    assert isinstance(found, dict)
    return found
