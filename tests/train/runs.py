"""Small runs that tests train, and what they look at afterwards."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from rlstab.config import RunConfig, dump_run, load_run
from rlstab.train.loop import RunResult, train
from rlstab.train.policy import load_policy
from tests.tolerances import depth, drift, rounding

#: Bound on the logits of the model that `small` trains, on what it samples.
LOGIT = 20.0


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


def file_of(run: RunConfig) -> Path:
    """The file of a run, beside its folder."""
    out = Path(run.tracking.out)
    file = out.with_suffix(".yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_run(run))
    return file


def quiet() -> Console:
    """A console that is no terminal."""
    return Console(file=io.StringIO(), force_terminal=False)


def go(run: RunConfig, **options: Any) -> RunResult:
    """Train without printing."""
    return train(run, console=quiet(), **options)


def weights(out: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint, or of the adapter in it."""
    newest = sorted((out / "checkpoints").glob("rollout-*"))[-1]
    adapter = newest / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else newest / "model.safetensors")


def about(out: Path) -> dict[str, Any]:
    """What a run says of itself: the processes as they counted themselves, and the engine."""
    found: dict[str, Any] = json.loads((out / "run.json").read_text())
    return found


def largest_difference(one: Path, other: Path) -> float:
    """Largest absolute difference between the weights of two runs."""
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def sampler_gap(dtype: torch.dtype) -> float:
    """Bound on what rounding puts between the sampler's log-prob of a token and the trainer's."""
    model = load_policy("countdown-tiny").model
    # in bfloat16 sums are float32: what goes in and out of a layer's seven products and two of the attention is rounded
    terms = 2 * 9 * model.config.num_hidden_layers if dtype == torch.bfloat16 else _terms()
    return rounding(dtype, LOGIT, terms)


def _terms() -> int:
    return depth(load_policy("countdown-tiny").model, 40)


def weights_alike(one: Path, other: Path) -> None:
    """The weights of two runs differ by what rounding does to their training."""
    settings = load_run(one / "config.yaml").optimisation
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    steps = settings.rollouts * settings.optimizer_steps_per_rollout
    large, apart = (
        float(torch.cat([one.flatten().abs() for one in values]).quantile(0.9))
        for values in (left.values(), [left[name] - right[name] for name in left])
    )
    # forward and backward make the gradients, and each step rounds the weights
    assert apart <= steps * settings.lr * drift(2 * _terms()) + rounding(torch.float32, large, steps)


def trained_alike(one: Path, other: Path) -> None:
    """Weights and metrics of two runs on the same data differ by what rounding does to their training."""
    weights_alike(one, other)
    wide, narrow = (rounding(torch.float32, size, _terms()) for size in (LOGIT, 1.0))
    for mine, theirs in zip(without_times(one), without_times(other), strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            close = wide if name.startswith("sampler/") else narrow  # that is itself the rounding of log-probs
            assert theirs[name] == pytest.approx(mine[name], rel=wide, abs=close), name


def records(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def without_times(out: Path) -> list[dict[str, Any]]:
    """The metrics of a run, less what a clock measured."""
    return [{key: one[key] for key in one if not key.startswith("seconds/")} for one in records(out)]
