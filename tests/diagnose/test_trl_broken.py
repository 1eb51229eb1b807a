"""Real runs of TRL 1.16 that were broken on purpose: each cause is named in its folder, its console and a CSV."""

import csv
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlstab.look.diagnosis import diagnose
from rlstab.look.find import read_logs
from tests.diagnose.formats import DATA

#: GRPOTrainer on the chain model, 64 answers a step, limit 40, seed 42; the reward of an answer that ends is the share
#: of its four blocks that are right. By run, what differs, the cause, and the first step of the harm.
RUNS = {
    "healthy": (None, None),  # learning rate 5e-5
    "learning_rate": ("learning_rate", 2),  # 5e-3
    "constant_reward": ("no_gradient", 1),  # 0.5 for every answer, at 2e-4
    "limit_too_short": ("truncation", 1),  # 12 tokens and a reward for right sums alone, at 1e-4
    "limit_learnt": (None, None),  # 22 tokens at 2e-4: the answers become shorter, and the reward rises
    "stale": ("learning_rate", 9),  # num_iterations=8 at 1e-3
    "stale_unharmed": (None, None),  # num_iterations=8 at 5e-5
}
Lines = list[dict[str, float]]


def logged(name: str, every: int) -> Lines:
    """Its lines as ``logging_steps`` would have made them; steps of TRL that sample nothing have no reward."""
    lines = json.loads((DATA / "trl_broken" / f"{name}.json").read_text(encoding="utf-8"))["log_history"]
    windows = []
    for _, group in itertools.groupby(lines, lambda line: (line["step"] - 1) // every):
        window = list(group)
        means = {}
        for metric in dict.fromkeys(metric for line in window for metric in line):
            values = [line[metric] for line in window if metric in line]
            means[metric] = sum(values) / len(values)
        windows.append(means | {metric: window[-1][metric] for metric in ("step", "grad_norm")})  # as transformers
    return windows


def folder(lines: Lines, path: Path, every: int) -> Path:
    state = {"global_step": lines[-1]["step"], "log_history": lines, "logging_steps": every}
    (path / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    return path


def console(lines: Lines, path: Path, every: int) -> Path:
    printed = [{name: f"{value:.4g}" for name, value in line.items() if name != "step"} for line in lines]
    text = f"--logging_steps {every}\n" + "".join(f"{values}\n" for values in printed)
    (path / "train.log").write_text(text, encoding="utf-8")
    return path / "train.log"


def wandb_csv(lines: Lines, path: Path, every: int) -> Path:
    table = [
        {f"train/{'global_step' if name == 'step' else name}": value for name, value in line.items()}
        | {"_step": index * every}
        for index, line in enumerate(lines)
    ]
    with (path / "history.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in table for name in row)))
        writer.writeheader()
        writer.writerows(table)
    return path / "history.csv"


@pytest.mark.parametrize("source", [folder, console, wandb_csv])
@pytest.mark.parametrize("name", RUNS)
def test_the_cause_of_a_run_of_trl_that_was_broken(
    name: str, source: Callable[[Lines, Path, int], Path], tmp_path: Path
) -> None:
    cause, harm = RUNS[name]
    for every in (1, 5):
        (log,) = read_logs(source(logged(name, every), tmp_path, every))
        first = diagnose(log).first
        assert (first and first.cause) == cause, every
        if first and harm:
            line = -(-harm // every) * every  # in which the step is
            assert first.harm.step in (line, line + every), every


def test_a_limit_that_the_answers_adapt_to_is_an_observation(tmp_path: Path) -> None:
    (log,) = read_logs(folder(logged("limit_learnt", 1), tmp_path, 1))
    diagnosis = diagnose(log)
    assert [sign.name for sign in diagnosis.observations] == ["truncation"]
    assert diagnosis.outcome.startswith("the reward rose")


@pytest.mark.parametrize("name", ["learning_rate", "stale"])
def test_the_outcome_says_that_a_reward_was_lost_in_the_first_steps(name: str, tmp_path: Path) -> None:
    (log,) = read_logs(folder(logged(name, 1), tmp_path, 1))
    assert diagnose(log).outcome.startswith("the reward fell from 0.543 to ")


def test_neither_a_lucky_first_answer_nor_a_noisy_first_line_is_a_loss(tmp_path: Path) -> None:
    for rewards in ([0.05] + 11 * [0.0], [0.6, *(0.1 + 0.03 * (step * 7 % 11) for step in range(24))]):
        lines = [{"reward": reward, "step": step} for step, reward in enumerate(rewards, 1)]
        (log,) = read_logs(folder(lines, tmp_path, 1))
        assert not [sign for sign in diagnose(log).fired if sign.name == "reward_fall"], rewards
