"""What an installation shows of itself, without the clone: ``python -m pytest --pyargs rlstab.testing``.

Every method and stage at its first example settings under the laws, a few draws each; every preset and every example
that ships, read; one short run and its page, where the extra ``train`` is installed. Minutes, with the extra
``testing``. The tests of the clone are many more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlstab
from rlstab.config import load_objective, load_run, objective_hash
from rlstab.config.bundled_examples import examples
from rlstab.core.objective import TokenObjective
from rlstab.errors import MissingPackage
from rlstab.extras import require
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.stages.stage import Stage
from rlstab.testing.examples import EXAMPLES
from rlstab.testing.objective_check import check_objective
from rlstab.testing.stage_check import check_stage
from rlstab.testing.stage_examples import STAGE_EXAMPLES

#: Of the run that is trained: seconds on one core.
_SHORT = {
    "rollout.prompts": 4,
    "rollout.group": 4,
    "optimisation.rollouts": 3,
    "optimisation.mini_batches": 1,
    "evaluation.prompts": 8,
    "evaluation.samples": 4,
    "tracking.trace_every": 1,
}


@pytest.mark.parametrize("method", [several[0] for several in EXAMPLES.values()], ids=lambda one: str(one.name))
def test_a_method_obeys_the_laws(method: TokenObjective) -> None:
    report = check_objective(method, examples=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("stage", [several[0] for several in STAGE_EXAMPLES.values()], ids=lambda one: str(one.name))
def test_a_stage_obeys_the_laws(stage: Stage) -> None:
    report = check_stage(stage, examples=2)
    assert report.ok, str(report)


def test_every_name_is_found() -> None:
    assert set(EXAMPLES) <= set(rlstab.available())
    assert set(STAGE_EXAMPLES) <= set(STAGES.names())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_read(name: str) -> None:
    assert objective_hash(load_objective({"preset": name})) == objective_hash(PRESETS[name].objective)


def test_the_examples_ship() -> None:
    assert {"countdown", "chain"} <= examples().keys()
    for one in examples().values():
        if one.kind == "run":
            load_run(one.path)
        elif one.kind == "objective":
            load_objective(one.path)


def test_an_example_trains_and_is_looked_at(tmp_path: Path) -> None:
    try:
        require("train", "Training")
    except MissingPackage as missing:
        pytest.skip(str(missing))
    changes = [f"--set={key}={value}" for key, value in _SHORT.items()]
    for command in (["train", "--example", "countdown", *changes], ["view", "runs/countdown"], ["runs"]):
        ran = subprocess.run(
            [sys.executable, "-m", "rlstab", *command],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(rlstab.__file__).parents[1])},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
    assert "finished" in ran.stdout
    assert (tmp_path / "runs" / "countdown" / "view.html").stat().st_size > 10_000
