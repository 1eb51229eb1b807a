"""Runs of rlstab as other trainers would have logged them: by the names that their sources use."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
#: Six broken on purpose, called after their cause, and two healthy ones: `python -m benchmarks diagnose --seeds 0`.
BROKEN = ("learning_rate", "staleness", "mismatch", "entropy_collapse", "dead_groups", "truncation")
HEALTHY = ("healthy", "healthy_off_policy")

Row = Mapping[str, Any]


def rows(name: str) -> list[dict[str, Any]]:
    """The lines of one of the runs."""
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def clipped(row: Row) -> float:
    return float(row.get("ratio/clipped_high", 0.0) + row.get("ratio/clipped_low", 0.0))


#: rlstab's name by the name in TRL 1.16.
TRL: Mapping[str, tuple[str, Callable[[Row], float]]] = {
    "reward": ("reward/mean", lambda row: row["reward/mean"]),
    "frac_reward_zero_std": ("reward/zero_std_groups", lambda row: row["reward/zero_std_groups"]),
    "entropy": ("tokens/entropy", lambda row: row["tokens/entropy"]),
    "grad_norm": ("gradient/norm", lambda row: row["gradient/norm"]),
    "learning_rate": ("lr", lambda row: row["lr"]),
    "completions/clipped_ratio": ("response/ended", lambda row: 1 - row["response/ended"]),
    "completions/mean_length": ("response/length", lambda row: row["response/length"]),
    "clip_ratio/high_mean": ("ratio/clipped_high", lambda row: row["ratio/clipped_high"]),
    "clip_ratio/low_mean": ("ratio/clipped_low", lambda row: row["ratio/clipped_low"]),
    "clip_ratio/region_mean": ("ratio/clipped_high", clipped),
    "sampling/sampling_logp_difference/mean": ("sampler/gap", lambda row: row["sampler/gap"]),
}

#: The same of verl 0.9, which compares probabilities of sampler and trainer, not log-probs, and knows no groups.
VERL: Mapping[str, tuple[str, Callable[[Row], float]]] = {
    "critic/score/mean": ("reward/mean", lambda row: row["reward/mean"]),
    "critic/score/max": ("reward/mean", lambda row: row["reward/mean"] + (row["reward/zero_std_groups"] < 1)),
    "critic/score/min": ("reward/mean", lambda row: row["reward/mean"] - (row["reward/zero_std_groups"] < 1)),
    "actor/entropy": TRL["entropy"],
    "actor/grad_norm": TRL["grad_norm"],
    "actor/lr": TRL["learning_rate"],
    "actor/pg_clipfrac": TRL["clip_ratio/region_mean"],
    "response_length/mean": TRL["completions/mean_length"],
    "response_length/clip_ratio": TRL["completions/clipped_ratio"],
}


def renamed(row: Row, names: Mapping[str, tuple[str, Callable[[Row], float]]]) -> dict[str, float]:
    """One line under other names; what it lacks stays away."""
    return {name: turn(row) for name, (ours, turn) in names.items() if row.get(ours) is not None}


def trainer_state(lines: Iterable[Row]) -> str:
    """A trainer_state.json."""
    history: list[dict[str, Any]] = []
    for row in lines:
        if row["rollout"]:
            history.append({"epoch": row["rollout"] / 100, **renamed(row, TRL), "step": row["rollout"]})
    history.append({"eval_reward": 0.3, "eval_entropy": 9.0, "step": history[-1]["step"]})
    history.append({"train_runtime": 3.0, "train_loss": 0.1, "step": history[-1]["step"]})
    return json.dumps({"global_step": history[-1]["step"], "log_history": history, "logging_steps": 1})


def verl_lines(lines: Iterable[Row]) -> str:
    """What verl's file logger writes."""
    data = [{"step": row["rollout"], "data": renamed(row, VERL)} for row in lines if row["rollout"]]
    return "".join(json.dumps(line) + "\n" for line in data)


def wandb_history(lines: Iterable[Row]) -> str:
    """A CSV of one run as wandb exports its history: TRL's names with transformers' prefix."""
    table = [
        {"_step": 2 * row["rollout"], "train/global_step": row["rollout"]}
        | {f"train/{name}": value for name, value in renamed(row, TRL).items()}
        for row in lines
        if row["rollout"]
    ]
    names = list(dict.fromkeys(name for line in table for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def wandb_chart(metric: str, runs: Mapping[str, Iterable[Row]]) -> str:
    """A CSV of a chart: for each run the curve and its envelope, empty where a run has no value."""
    ours, turn = TRL[metric]
    columns = {
        name: {row["rollout"]: turn(row) for row in lines if row.get(ours) is not None} for name, lines in runs.items()
    }
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["Step", *(f"{name} - train/{metric}{end}" for name in runs for end in ("", "__MIN", "__MAX"))])
    for step in sorted({step for column in columns.values() for step in column}):
        writer.writerow([step, *(columns[name].get(step, "") for name in runs for _ in range(3))])
    return text.getvalue()


#: By the trainer that writes it: a file, and its text.
FORMS = {
    "TRL": ("trainer_state.json", trainer_state),
    "verl": ("run.jsonl", verl_lines),
    "wandb": ("history.csv", wandb_history),
}


def written(name: str, form: str, folder: Path) -> Path:
    """One of the runs in a file of another trainer."""
    if form == "rlstab":
        return DATA / f"{name}.jsonl"
    end, text = FORMS[form]
    (folder / end).write_text(text(rows(name)), encoding="utf-8")
    return folder / end
