"""Folders as `rlstab train` and `rlstab bench` leave them, with curves of known shape, and records without a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlstab.report.runs import RunRecord, highest

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.28, "dual_clip": None}
S2T = {"name": "s2t", "max_prob": 0.002, "quantile": 0.75, "population": "candidates"}
STARE = {"name": "stare", "target_entropy": 0.3, "variant": "O1", "share": 0.1}
TOP = {"name": "top_entropy", "share": 0.2}

#: Objective by method of the synthetic benches.
OBJECTIVES: dict[str, list[dict[str, Any]]] = {
    "grpo": [{"name": "token_mean"}],
    "clip": [CLIP],
    "s2t": [CLIP, S2T],
    "stare": [CLIP, STARE],
    "20_entropy": [CLIP, TOP],
}


def config(
    objective: Sequence[Mapping[str, Any]], *, rollouts: int = 60, seed: int = 0, lr: float = 2e-4
) -> dict[str, Any]:
    """A resolved run; only what a report reads."""
    return {
        "model": {"name": "countdown-tiny"},
        "task": {"name": "countdown"},
        "rollout": {"prompts": 16, "group": 8},
        "objective": [dict(one) for one in objective],
        "optimisation": {"rollouts": rollouts, "epochs": 1, "mini_batches": 1, "lr": lr},
        "evaluation": {"every": 20},
        "tracking": {"out": "runs/run"},
        "seed": seed,
    }


def curves(
    rollouts: int, seed: int, *, gain: float = 0.2, floor: float = 0.1, noise: float = 0.02
) -> dict[str, list[float]]:
    """Reward rising by ``gain`` from 0.15, entropy falling from 0.36 to ``floor``, everything else ordinary."""
    rng = np.random.default_rng([rollouts, seed, round(1000 * gain), round(1000 * floor)])
    t = np.arange(1, rollouts + 1) / 100
    draw = {name: rng.normal(size=rollouts) for name in ("reward", "entropy", "norm", "equal")}
    norm = 0.5 * np.exp(0.2 * draw["norm"])
    found = {
        "reward/mean": np.clip(0.15 + gain * (1 - np.exp(-t)) + noise * draw["reward"], 0, 1),
        "reward/zero_std_groups": np.clip(0.4 + 0.05 * draw["equal"], 0, 1),
        "tokens/entropy": np.maximum(floor + (0.36 - floor) * np.exp(-2 * t) + 0.005 * draw["entropy"], 0),
        "response/ended": np.ones(rollouts),
        "gradient/norm": norm,
        "gradient/largest_norm": 1.5 * norm,
        "ratio/clipped_high": np.zeros(rollouts),
        "ratio/clipped_low": np.zeros(rollouts),
    }
    return {name: values.tolist() for name, values in found.items()}


def write_run(
    folder: Path,
    *,
    objective: Sequence[Mapping[str, Any]] = (CLIP,),
    seed: int = 0,
    rollouts: int = 60,
    lr: float = 2e-4,
    done: int | None = None,
    evaluate: bool = True,
    changes: Mapping[str, Sequence[float]] | None = None,
    about: Mapping[str, Any] | None = None,
    shape: Mapping[str, float] | None = None,
    stages: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """A run folder.

    Args:
        done: rollouts it came to; all without it.
        changes: curves by metric instead of, or beside, those of :func:`curves`.
        about: entries of run.json beside the usual.
        shape: options of :func:`curves`.
        stages: of the configuration, where there are some.
    """
    folder.mkdir(parents=True)
    whole = config(objective, rollouts=rollouts, seed=seed, lr=lr)
    whole |= {"stages": [dict(one) for one in stages]} if stages else {}
    (folder / "config.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    usual = {
        "run_hash": f"{seed:012x}",
        "objective_hash": "0123456789ab",
        "command": "rlstab train run.yaml",
        "rlstab": "0.1.0",
        "torch": "2.13.0",
        "device": "cpu",
        "machine": "Linux",
    }
    (folder / "run.json").write_text(json.dumps({**usual, **(about or {})}))
    values = {**curves(rollouts, seed, **(shape or {})), **(changes or {})}
    lines = []
    for place in range((rollouts if done is None else done) + 1):
        line: dict[str, Any] = {"rollout": place}
        if place:
            line |= {name: one[place - 1] for name, one in values.items()}
            line["seconds/rollout"] = 0.25
        if evaluate and (place % 20 == 0 or place == rollouts):
            reward = values["reward/mean"][max(place - 1, 0)] if place else 0.15
            entropy = values["tokens/entropy"][max(place - 1, 0)]
            line |= {"eval/mean": reward, "eval/greedy": 1.2 * reward, "eval/pass@4": min(1.0, 2.5 * reward)}
            line |= {"eval/entropy": entropy}
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def write_bench(
    out: Path,
    *,
    name: str = "entropy",
    methods: Mapping[str, Mapping[str, Any]] | None = None,
    settings: Mapping[str, float] | None = None,
    seeds: int = 4,
    rollouts: int = 60,
    baseline: str = "grpo",
) -> Path:
    """A bench folder.

    Args:
        methods: options of :func:`write_run` by method; four methods without it.
        settings: learning rate by setting; one named ``default`` without it.
    """
    settings = {"default": 2e-4} if settings is None else settings
    methods = methods or {
        "grpo": {"shape": {"floor": 0.1}},
        "s2t": {
            "shape": {"floor": 0.1},
            "changes": {"s2t/candidates": [0.01] * rollouts, "s2t/dropped": [0.001] * rollouts},
        },
        "20_entropy": {"shape": {"floor": 0.25, "gain": 0.15}, "changes": {"top_entropy/share": [0.2] * rollouts}},
        "stare": {
            "shape": {"floor": 0.2},
            "changes": {"stare/gate": [0.0] * rollouts, "stare/boost": [1.1] * rollouts},
        },
    }
    out.mkdir(parents=True)
    about = {
        "name": name,
        "hash": "ab12cd34ef56",
        "baseline": baseline,
        "command": f"rlstab bench examples/{name}.yaml",
    }
    (out / "bench.json").write_text(json.dumps(about))
    for setting, lr in settings.items():
        for method, options in methods.items():
            for seed in range(seeds):
                folder = out / "runs" / setting / method / f"seed-{seed}"
                write_run(
                    folder,
                    **{"objective": OBJECTIVES.get(method), "seed": seed, "rollouts": rollouts, "lr": lr, **options},
                )
                place_run(folder, bench=name, setting=setting, method=method, seed=seed)
    return out


def place_run(folder: Path, **place: Any) -> None:
    """The bench's own file in a run folder."""
    usual = {
        "status": "finished",
        "error": None,
        "seconds": 20.0,
        "cpu_seconds": 18.0,
        "command": "rlstab bench --only",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps({**usual, **place}))


def record(values: Mapping[str, Sequence[float]], **fields: Any) -> RunRecord:
    """A finished run with the given curves, one value per rollout from the first on."""
    metrics = {
        name: (np.arange(1, len(one) + 1, dtype=np.int64), np.array(one, dtype=np.float64))
        for name, one in values.items()
    }
    rollouts = max((len(one) for one in values.values()), default=0)
    usual: dict[str, Any] = {
        "bench": None,
        "setting": "default",
        "method": "grpo",
        "seed": 0,
        "status": "finished",
        "error": None,
        "path": "run",
        "config": config([CLIP], rollouts=rollouts),
        "about": {},
        "command": None,
        "cpu_seconds": None,
        "seconds": None,
        "evaluations": [],
        "metrics": metrics,
        "largest": {name: highest(curve, rollouts) for name, curve in metrics.items() if name.endswith("largest_norm")},
    }
    return RunRecord(**{**usual, **fields})


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """Four methods, one setting, four seeds, sixty rollouts."""
    return write_bench(tmp_path / "entropy")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two methods at three learning rates; grpo collapses at the two higher ones, s2t at the highest."""
    out, rollouts = tmp_path / "stability", 60
    good = curves(rollouts, 0)["reward/mean"]
    dying = [value * max(0.0, 1 - max(0, place - 30) / 10) for place, value in enumerate(good)]
    settings = {"lr_1e-4": 1e-4, "lr_2e-4": 2e-4, "lr_4e-4": 4e-4}
    write_bench(out, name="stability", settings={}, seeds=0)
    dies: dict[str, Callable[[float], bool]] = {"grpo": lambda lr: lr > 1e-4, "s2t": lambda lr: lr > 2e-4}
    for setting, lr in settings.items():
        for method in ("grpo", "s2t"):
            for seed in range(3):
                folder = out / "runs" / setting / method / f"seed-{seed}"
                reward = dying if dies[method](lr) else good
                changes = {"reward/mean": reward}
                write_run(folder, objective=OBJECTIVES[method], seed=seed, rollouts=rollouts, lr=lr, changes=changes)
                place_run(folder, bench="stability", setting=setting, method=method, seed=seed)
    return out
