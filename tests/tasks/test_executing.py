"""Which data sets of reasoning-gym execute completions: found by trying, on the version that is installed."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

import rlstab
from rlstab.errors import OutOfRange
from rlstab.tasks import ReasoningGym
from rlstab.tasks.reasoning_gym import executing
from rlstab.tasks.scoring import Workers
from tests.tasks.acts import AnyDataSet
from tests.tasks.hostile import payloads
from tests.tasks.test_scoring import sandbox_or_skip

LISTED = json.loads((Path(rlstab.__file__).parent / "data" / "reasoning_gym.json").read_text())


def options_of(name: str) -> dict[str, Any]:
    """A data set of data sets is what those are."""
    if name != "composite":
        return {}
    from reasoning_gym.composite import DatasetSpec

    return {"datasets": [DatasetSpec("n_queens", 1.0, {})]}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_list_is_what_trying_all_data_sets_gives(tmp_path: Path) -> None:
    factory = pytest.importorskip("reasoning_gym").factory
    workers = Workers(AnyDataSet(), 2, 2.0)
    executes, tried = set(), 0
    for name in sorted(factory.DATASETS):
        folder = tmp_path / name
        folder.mkdir()
        options = options_of(name)
        made = factory.create_dataset(name, seed=0, size=3, **options)
        jobs = [((name, options, made[index]), one) for index in range(3) for one in payloads(folder)]
        tried += len(workers.score(jobs))
        if list(folder.iterdir()):
            executes.add(name)
    workers.close()
    found = ", ".join(sorted(executes))
    print(f"{len(executes)} of {len(factory.DATASETS)} data sets execute completions, by {tried} tries: {found}")
    assert sorted(executes) == LISTED["executes"] == sorted(executing())
    assert importlib.metadata.version("reasoning-gym") == LISTED["version"]


@pytest.mark.parametrize("name", LISTED["executes"])
def test_they_are_refused(name: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(OutOfRange, match=rf"'{name}' executes completions as Python: .* `execute_completions: true`"):
        ReasoningGym(name, options_of(name))


def test_one_that_is_allowed_scores_in_a_sandbox(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    sandbox_or_skip().close()
    task = ReasoningGym("puzzle24", execute_completions=True)
    example = task.example("train", 0)
    assert task.score(example, example.answer["answer"]) == 1.0
    assert task.score(example, "1+1") == 0.01  # reasoning-gym's own credit for a wrong answer
    assert {task.score(example, one) for one in payloads(tmp_path)} == {0.01}
    assert list(tmp_path.iterdir()) == []
    task.workers.close()
