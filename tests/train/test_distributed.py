"""Two processes train to the same weights as one on the same data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlstab.config import dump_run
from tests.train.runs import go, small, trained_alike

STACK = [{"preset": "recommended"}, {"name": "lp_reg", "share": 0.2}, "entropy_bonus"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__prompts": 6, "evaluation__every": 3, "evaluation__prompts": 5},
        # three mini-batches of one prompt: in each optimizer step one rank is empty
        {"rollout__prompts": 3, "optimisation__mini_batches": 3, "optimisation__epochs": 2},
    ],
    ids=["one step", "an empty rank"],
)
def test_two_processes_train_to_the_same_weights_as_one(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = {"optimisation__lr": 1e-4, **changes}
    one = small(tmp_path / "one", STACK, **settings)
    go(one)
    file = tmp_path / "two.yaml"
    file.write_text(dump_run(small(tmp_path / "two", STACK, **settings)))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu"]
    quiet = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]  # or it asks for them
    subprocess.run(
        [*launch, *quiet, "-m", "rlstab.cli", "train", str(file)],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    trained_alike(one, tmp_path / "two")
