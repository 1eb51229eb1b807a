"""Folders as `rlstab train` and `rlstab bench` leave them, with curves of known shape, and records without a folder."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlstab.bins import in_bins
from rlstab.report.comparison import Comparison, compare
from rlstab.report.load import load_runs
from rlstab.report.runs import RunRecord

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.28, "dual_clip": None}
S2T = {"name": "s2t", "max_prob": 0.002, "quantile": 0.75, "population": "candidates"}
STARE = {"name": "stare", "target_entropy": 0.3, "variant": "O1", "share": 0.1}
TOP = {"name": "top_entropy", "share": 0.2}

#: Objective by method of the synthetic benches.
OBJECTIVES: dict[str, list[dict[str, Any]]] = {
    "grpo": [{"name": "token_mean"}],
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
        "objective": [dict(item) for item in objective],
        "optimisation": {"rollouts": rollouts, "epochs": 1, "mini_batches": 1, "lr": lr},
        "tracking": {"out": "runs/run"},
        "seed": seed,
    }


def curves(rollouts: int, seed: int, *, gain: float = 0.2, floor: float = 0.1) -> dict[str, list[float]]:
    """Reward rising by ``gain`` from 0.15, entropy falling from 0.36 to ``floor``, everything else ordinary."""
    rng = np.random.default_rng([rollouts, seed, round(1000 * gain), round(1000 * floor)])
    t = np.arange(1, rollouts + 1) / 100
    draw = {name: rng.normal(size=rollouts) for name in ("reward", "entropy", "norm", "equal")}
    norm = 0.5 * np.exp(0.2 * draw["norm"])
    values = {
        "reward/mean": np.clip(0.15 + gain * (1 - np.exp(-t)) + 0.02 * draw["reward"], 0, 1),
        "reward/zero_std_groups": np.clip(0.4 + 0.05 * draw["equal"], 0, 1),
        "tokens/entropy": np.maximum(floor + (0.36 - floor) * np.exp(-2 * t) + 0.005 * draw["entropy"], 0),
        "response/ended": np.ones(rollouts),
        "gradient/norm": norm,
        "gradient/largest_norm": 1.5 * norm,
        "ratio/clipped_high": np.zeros(rollouts),
        "ratio/clipped_low": np.zeros(rollouts),
    }
    return {name: curve.tolist() for name, curve in values.items()}


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
    """A run folder that came to ``done`` rollouts, with ``changes`` to the curves of a ``shape``."""
    folder.mkdir(parents=True)
    whole = config(objective, rollouts=rollouts, seed=seed, lr=lr) | ({"stages": list(stages)} if stages else {})
    (folder / "config.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    usual = {"run_hash": f"{seed:012x}", "command": "rlstab train run.yaml", "rlstab": "0.1.0", "device": "cpu"}
    (folder / "run.json").write_text(json.dumps({**usual, **(about or {})}))
    values = {**curves(rollouts, seed, **(shape or {})), "seconds/rollout": [0.25] * rollouts, **(changes or {})}
    lines = []
    for rollout in range((rollouts if done is None else done) + 1):
        line: dict[str, Any] = {"rollout": rollout}
        if rollout:
            line |= {name: curve[rollout - 1] for name, curve in values.items()}
        if evaluate and (rollout % 20 == 0 or rollout == rollouts):
            reward = line.get("reward/mean", 0.15)
            line |= {"eval/mean": reward, "eval/greedy": 1.2 * reward, "eval/pass@4": min(1.0, 2.5 * reward)}
            line |= {"eval/entropy": values["tokens/entropy"][max(rollout - 1, 0)]}
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def place_run(folder: Path, **place: Any) -> None:
    """The bench's own file in a run folder."""
    usual = {"status": "finished", "seconds": 20.0, "cpu_seconds": 18.0, "command": "rlstab bench --only"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps({**usual, **place}))


#: Options of :func:`write_run` by method of a usual bench: s2t moves nothing, two methods end with more entropy.
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "s2t": {"changes": {"s2t/candidates": [0.01] * 60, "s2t/dropped": [0.001] * 60}},
    "20_entropy": {"shape": {"floor": 0.25, "gain": 0.15}, "changes": {"top_entropy/share": [0.2] * 60}},
    "stare": {"shape": {"floor": 0.2}, "changes": {"stare/gate": [0.0] * 60, "stare/boost": [1.1] * 60}},
}


def write_bench(
    out: Path,
    *,
    name: str = "entropy",
    methods: Mapping[str, Mapping[str, Any]] = METHODS,
    seeds: int = 4,
    baseline: str = "grpo",
    setting: str = "default",
) -> Path:
    """A bench folder of one setting, or this setting of it too."""
    out.mkdir(parents=True, exist_ok=True)
    about = {"name": name, "baseline": baseline, "command": f"rlstab bench examples/{name}.yaml"}
    (out / "bench.json").write_text(json.dumps(about))
    for method, options in methods.items():
        for seed in range(seeds):
            folder = out / "runs" / setting / method / f"seed-{seed}"
            own = {key: value(seed) if callable(value) else value for key, value in options.items()}
            write_run(folder, **{"objective": OBJECTIVES.get(method), "seed": seed, **own})
            place_run(folder, bench=name, setting=setting, method=method, seed=seed)
    return out


def record(values: Mapping[str, Sequence[float]], **fields: Any) -> RunRecord:
    """A finished run with the given curves, one value per rollout from the first on."""
    metrics = {
        name: (np.arange(1, len(curve) + 1, dtype=np.int64), np.array(curve, dtype=np.float64))
        for name, curve in values.items()
    }
    rollouts = max(map(len, values.values()), default=0)
    usual: dict[str, Any] = {"bench": None, "setting": "default", "method": "grpo", "seed": 0, "path": "run"}
    usual |= {"status": "finished", "config": config([CLIP], rollouts=rollouts), "evaluations": []}
    norms = [name for name in metrics if name.endswith("largest_norm")]
    largest = {name: in_bins(metrics[name], rollouts, largest=True) for name in norms}
    return RunRecord(**{**usual, "metrics": metrics, "largest": largest, **fields})


def rewards(seed: int, lost: bool) -> list[float]:
    """The rewards of a run that learns, or that loses them after half of its rollouts."""
    good = curves(60, seed)["reward/mean"]
    return [value * max(0.0, 1 - max(0, place - 30) / 10) for place, value in enumerate(good)] if lost else good


def write_sweep(out: Path) -> Path:
    """Two methods at three learning rates; grpo collapses at the two higher ones, s2t at the highest."""
    for lr, dead in ((1e-4, ()), (2e-4, ("grpo",)), (4e-4, ("grpo", "s2t"))):
        methods = {
            name: {"lr": lr, "changes": lambda seed, lost=name in dead: {"reward/mean": rewards(seed, lost)}}
            for name in ("grpo", "s2t")
        }
        setting = f"lr_{lr:.0e}".replace("e-0", "e-")
        write_bench(out, name="stability", methods=methods, seeds=3, setting=setting)
    return out


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a bench of four methods of four seeds, and of a sweep, written once."""
    folder = tmp_path_factory.mktemp("made")
    write_bench(folder / "entropy")
    write_sweep(folder / "stability")
    return folder


@pytest.fixture
def bench(made: Path, tmp_path: Path) -> Path:
    """A copy of the bench, to be changed."""
    return Path(shutil.copytree(made / "entropy", tmp_path / "entropy"))


@pytest.fixture
def sweep(made: Path, tmp_path: Path) -> Path:
    """A copy of the sweep; see :func:`write_sweep`."""
    return Path(shutil.copytree(made / "stability", tmp_path / "stability"))


@pytest.fixture(scope="session")
def compared(made: Path) -> Comparison:
    """What the bench says, for tests that only read it."""
    return compare(load_runs(made / "entropy"))


@pytest.fixture(scope="session")
def swept(made: Path) -> Comparison:
    """What the sweep says, likewise."""
    return compare(load_runs(made / "stability"))
