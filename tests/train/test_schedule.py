"""The learning rate by a schedule of transformers: its values, every optimizer step counted, a resume bit for bit."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from rlstab.config import load_run
from rlstab.config.settings import CUTS, ENDING, FOLLOWING, OPTIONS
from rlstab.errors import ConfigError
from rlstab.train.journal import read
from rlstab.train.learning_rate import learning_rate
from tests.train.runs import go, largest_difference, quiet, small, train, without_times

EXAMPLES: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4, "warmup_lr_rate": 0.2},
    "cosine_with_restarts": {"num_cycles": 2.0},
    "polynomial": {"lr_end": 1e-5, "power": 2.0},
    "warmup_stable_decay": {"num_decay_steps": 4},
    "inverse_sqrt": {"timescale": 3},
}
LONG: dict[str, Any] = {"optimisation__rollouts": 4, "optimisation__mini_batches": 2, "tracking__checkpoint_every": 2}


def rates(**optimisation: Any) -> list[float]:
    settings = load_run({"objective": "s2t", "optimisation": {"lr": 1e-3, **optimisation}}).optimisation
    rate = learning_rate(settings)
    return [rate(step) for step in range(1, settings.optimizer_steps + 1)]


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_values_are_those_of_transformers(name: str) -> None:
    """Stepped as its trainer does: the first optimizer step before the first step of the scheduler."""
    options = EXAMPLES.get(name, {})
    found = rates(rollouts=6, epochs=2, warmup_optimizer_steps=3, schedule={"name": name, **options})
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    if "num_cycles" in options:
        options = {"num_cycles": 2}
    theirs = get_scheduler(name, optimizer, 3, 12, scheduler_specific_kwargs=options)
    expected = []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert found == expected
    assert (rates(rollouts=12, warmup_optimizer_steps=3, schedule={"name": name, **EXAMPLES.get(name, {})})) == found
    longer = rates(rollouts=24, warmup_optimizer_steps=3, schedule={"name": name, **EXAMPLES.get(name, {})})
    assert (longer[:12] != found) == (name in ENDING)


def test_every_schedule_and_option_of_transformers_is_known() -> None:
    theirs = {one.value: inspect.signature(made) for one, made in TYPE_TO_SCHEDULER_FUNCTION.items()}
    assert theirs.keys() == {*OPTIONS, *FOLLOWING}
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for name, options in OPTIONS.items():
        assert {*theirs[name].parameters} - ours == {*options}, name


def test_without_a_schedule_it_is_constant_after_the_warm_up() -> None:
    assert rates(rollouts=4, warmup_optimizer_steps=2) == [5e-4, 1e-3, 1e-3, 1e-3]


def test_a_resumed_run_goes_on_in_it_and_a_longer_one_says_so(tmp_path: Path, capsys: Any) -> None:
    changes = {**LONG, "optimisation__schedule": "cosine", "optimisation__warmup_optimizer_steps": 2}
    go(small(tmp_path / "whole", **changes))
    rate = rates(rollouts=4, mini_batches=2, warmup_optimizer_steps=2, schedule="cosine")
    for record in read(tmp_path / "whole" / "metrics.jsonl")[0]:
        number = int(record["rollout"])
        steps = rate[2 * number - 2 : 2 * number]
        if not record.get("optimizer_steps/skipped"):
            assert record["lr"] == pytest.approx(sum(steps) / 2, rel=1e-12)
        elif "lr" in record:  # a step that was skipped has moved on in the schedule
            assert any(record["lr"] == pytest.approx(one, rel=1e-12) for one in steps)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "rollout-000004")
    go(small(tmp_path / "run", **changes), resume=True)
    assert largest_difference(tmp_path / "run", tmp_path / "whole") == 0
    assert without_times(tmp_path / "run") == without_times(tmp_path / "whole")
    console = quiet()
    train(small(tmp_path / "run", **{**changes, "optimisation__rollouts": 5}), resume=True, console=console)
    said = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "optimisation.rollouts was 4 and is 5 now: the schedule 'cosine' ends with them" in said
    more = rates(rollouts=5, mini_batches=2, warmup_optimizer_steps=2, schedule="cosine")
    last = read(tmp_path / "run" / "metrics.jsonl")[0][-1]
    assert min(more[8:]) <= last.get("lr", more[8]) <= max(more[8:])


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ("cosin", "optimisation.schedule.name: expected 'constant', "),
        ("greedy", "optimisation.schedule: 'greedy' follows a loss, and the loss of a policy gradient does not say"),
        (
            {"name": "linear", "num_cycles": 1},
            "optimisation.schedule.num_cycles: the schedule 'linear' does not",
        ),
        ({"name": "linear", "cycles": 1}, "optimisation.schedule.cycles: unknown key 'cycles'."),
        ({"num_cycles": 1}, "optimisation.schedule: the setting `name` is missing; it has no default."),
        ("cosine_with_min_lr", "optimisation.schedule: 'cosine_with_min_lr' ends at `min_lr` or at `min_lr_rate`."),
        ("warmup_stable_decay", "optimisation.schedule: 'warmup_stable_decay' needs `num_decay_steps`"),
        (
            {"name": "cosine_with_restarts", "num_cycles": 1.5},
            "optimisation.schedule.num_cycles: 'cosine_with_re",
        ),
    ],
)
def test_a_schedule_that_cannot_be_used(schedule: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rates(schedule=schedule)
    assert str(caught.value).startswith(text)


def test_what_transformers_refuses() -> None:
    with pytest.raises(ConfigError, match=r"optimisation\.schedule: lr_end .* must be smaller"):
        rates(schedule={"name": "polynomial", "lr_end": 1.0})


@pytest.mark.parametrize("key", CUTS)
def test_a_distribution_that_is_cut_off_is_refused(key: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"objective: s2t\nrollout:\n  group: 4\n  {key}: 0.9\n")
    with pytest.raises(ConfigError) as caught:
        load_run(file)
    said = str(caught.value)
    assert said.startswith(
        f"{file}:4: rollout.{key}: responses are drawn from the whole distribution. Cut off, it would"
    )
    assert said.endswith("lower rollout.temperature, which acts on the loss as well.")
