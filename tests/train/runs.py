"""Small runs that tests train, and what they look at afterwards."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from rlstab.config import RunConfig, load_run
from rlstab.train.loop import RunResult, train


def small(out: Path, objective: Any = "clip_higher", **changes: Any) -> RunConfig:
    """A run of a few seconds; ``changes`` are dotted settings with ``__`` for the dot."""
    data = {
        "objective": objective,
        "rollout": {"prompts": 4, "group": 4, "max_new_tokens": 16},
        "optimisation": {"rollouts": 3, "lr": 1e-3},
        "evaluation": {"every": 0},
        "tracking": {"out": str(out), "checkpoint_every": 0},
    }
    return load_run(data, {key.replace("__", "."): value for key, value in changes.items()})


def quiet() -> Console:
    """A console that is no terminal."""
    return Console(file=io.StringIO(), force_terminal=False)


def go(run: RunConfig, **options: Any) -> RunResult:
    """Train without printing."""
    return train(run, console=quiet(), **options)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint."""
    return load_file(sorted((out / "checkpoints").glob("rollout-*"))[-1] / "model.safetensors")


def largest_difference(one: Path, other: Path) -> float:
    """Largest absolute difference between the weights of two runs."""
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def without_times(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run, less what a clock measured."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not key.startswith("seconds/")} for line in lines]
