"""How often ``rlstab look`` names the right first cause: runs broken on purpose, and healthy ones.

    python -m benchmarks diagnose --seeds 1 2 3 4 5 --json benchmarks/results/diagnose.jsonl
    python -m benchmarks diagnose --seeds 0 --data tests/diagnose/data

Each run is GRPO on the countdown model that ships, 8 prompts with 8 answers, changed in one way. The thresholds were
chosen on runs of seed 100, so other seeds are a fair test of them, on this task. Half a minute of one core each.
"""

import argparse
import io
import json
import multiprocessing
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlstab.config import load_run
from rlstab.look.diagnosis import diagnose
from rlstab.look.find import read_logs
from rlstab.look.remedies import CAUSES

CLIP = {"name": "clip_higher", "low": 0.2, "high": 0.2}
REWARDS = "benchmarks/broken_rewards.py"

BASE: Mapping[str, Any] = {
    "model": {"name": "countdown-tiny"},
    "task": {"name": "countdown"},
    "rollout": {"prompts": 8, "group": 8, "max_new_tokens": 24},
    "objective": [CLIP],
    "optimisation": {"rollouts": 60, "lr": 2e-4},
    "evaluation": {"every": 0},
    "tracking": {"samples": 1, "checkpoint_every": 0},
}

#: By the cause that should be named, what is changed; nothing should be found in those that begin with ``healthy``.
RUNS: Mapping[str, Mapping[str, Any]] = {
    "healthy": {},
    "healthy_off_policy": {
        "optimisation.epochs": 2,
        "optimisation.mini_batches": 2,
        "optimisation.lr": 1e-4,
        "optimisation.old_logprobs": "rollout",
    },
    "learning_rate": {"optimisation.lr": 1e-3},
    "staleness": {"rollout.staleness": 16, "optimisation.lr": 3e-4, "optimisation.old_logprobs": "recompute"},
    "mismatch": {"rollout.precision": "int4", "optimisation.old_logprobs": "recompute"},
    "entropy_collapse": {"reward": [f"{REWARDS}:fixed"], "optimisation.lr": 3e-4},
    "dead_groups": {"reward": [f"{REWARDS}:boxed"]},
    "truncation": {"reward": [f"{REWARDS}:longer"]},
}


def settings(name: str, seed: int, out: Path) -> dict[str, Any]:
    """The run file of one run."""
    data: dict[str, Any] = json.loads(json.dumps(BASE))
    for path, value in {**RUNS[name], "seed": seed, "tracking.out": str(out)}.items():
        *sections, key = path.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return data


def run(name: str, seed: int, out: Path) -> Path:
    """Train one run; gives its folder."""
    from rlstab.train.loop import train  # each process pays for itself

    train(
        load_run(settings(name, seed, out)),
        overwrite=True,
        console=Console(file=io.StringIO(), force_terminal=False),
    )
    return out


def judged(name: str, seed: int, out: Path) -> dict[str, Any]:
    """What ``rlstab look`` makes of a run."""
    (log,) = read_logs(out)
    diagnosis = diagnose(log)
    leading = next(iter(diagnosis.fired), None)
    return {
        "run": name,
        "seed": seed,
        "named": CAUSES[leading.name] if leading else None,
        "harmed": diagnosis.first is not None,
        "step": leading.step if leading else None,
        "signs": {sign.name: sign.step for sign in diagnosis.fired},
    }


def table(results: list[dict[str, Any]]) -> Table:
    """By run, how often which cause was named."""
    shown = Table("run", "runs", "right", "named", "told to change", title="what is named first")
    for name in RUNS:
        named = Counter(result["named"] or "nothing" for result in results if result["run"] == name)
        harmed = sum(result["harmed"] for result in results if result["run"] == name)
        right = named["nothing" if name.startswith("healthy") else name]
        told = ", ".join(f"{cause} {count}" for cause, count in named.most_common())
        shown.add_row(name, str(named.total()), str(right), told, str(harmed))
    return shown


def _one(job: tuple[str, int, Path, Path | None]) -> dict[str, Any]:
    name, seed, folder, data = job
    out = run(name, seed, folder / f"{name}-{seed}")
    if data is not None:
        data.mkdir(parents=True, exist_ok=True)
        (data / f"{name}.jsonl").write_text(slim(out / "metrics.jsonl"), encoding="utf-8")
    return judged(name, seed, out)


def slim(path: Path) -> str:
    """A ``metrics.jsonl`` without its times, to 6 significant digits: small enough to commit."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = {name: value for name, value in json.loads(line).items() if not name.startswith("seconds/")}
        short = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in record.items()}
        lines.append(json.dumps(short) + "\n")
    return "".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    options.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--json", type=Path, help="file to write a line of each run to")
    options.add_argument("--data", type=Path, help="folder to write the metrics of the runs to, of one seed")
    options.add_argument("--out", type=Path, help="folder in which the runs stay")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.out or Path(temporary)
        jobs = [(name, seed, folder, chosen.data) for seed in chosen.seeds for name in chosen.only]
        with multiprocessing.get_context("spawn").Pool(chosen.workers) as pool:
            results = pool.map(_one, jobs, chunksize=1)
    if chosen.json:
        chosen.json.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    Console().print(table(results))


assert {name for name in RUNS if not name.startswith("healthy")} <= set(CAUSES.values())
