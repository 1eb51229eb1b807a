"""Hostile completions for every scorer that ships: none hangs, none is executed."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlstab.config.settings import JsonlSettings, ReasoningGymSettings
from rlstab.tasks import Chain, Countdown, ReasoningGym, Task, TextTask
from rlstab.tasks.reasoning_gym import EXECUTING
from rlstab.tasks.rewards import Scores, score
from rlstab.tasks.workers import Workers
from tests.tasks.hostile import BACKTRACKING, FORMATS, NESTED, TERMINAL, AnyDataSet, hostile, payloads

CONTROLS = set(map(chr, [*range(9), *range(11, 32), 127, *range(128, 160)]))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    (tmp_path / "canary").mkdir()
    return tmp_path / "canary"


def texts(canary: Path, **settings: Any) -> TextTask:
    path = canary.parent / "rows.jsonl"
    path.write_text('{"prompt": "?", "answer": "1"}\n')
    return TextTask(JsonlSettings(path=str(path), eval_path=str(path), **{"time_limit": 1.0, "workers": 1, **settings}))


def survive(task: Task, completions: Sequence[str], canary: Path) -> Scores:
    """Score them all; each gets a number, and none of them makes its file."""
    scores = score(task, [task.example("train", 0)] * len(completions), completions)
    assert len(scores.rewards) == len(completions)
    assert all(map(math.isfinite, scores.rewards.tolist()))
    assert not scores.rewards[scores.timed_out].any()
    assert list(canary.iterdir()) == []
    assert not any(CONTROLS & set(error) for error in scores.errors)
    return scores


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_payloads_would_act(canary: Path) -> None:
    for payload in payloads(canary):
        with suppress(Exception):
            eval(payload)
    assert len(list(canary.iterdir())) >= 15


def test_scorers_in_this_process_and_patterns(canary: Path) -> None:
    completions = hostile(canary)
    for task in (Countdown(), Chain(), texts(canary)):
        assert task.workers is None
        assert set(survive(task, completions, canary).rewards.tolist()) <= {0.0, 1.0}
    assert not survive(texts(canary, answer_pattern="#### (.+)"), completions, canary).timed_out.any()
    completions.remove(BACKTRACKING[1])  # one that takes all of its time is enough
    scores = survive(texts(canary, answer_pattern="^((?:a+)+)$", time_limit=0.5), completions, canary)
    assert [completions[index] for index in scores.timed_out.nonzero()] == BACKTRACKING[:1]


@pytest.mark.slow
def test_math_verify(canary: Path) -> None:
    pytest.importorskip("math_verify")
    assert survive(texts(canary, scorer="math_verify"), hostile(canary), canary).timed_out.any()


def test_a_data_set_of_reasoning_gym(canary: Path) -> None:
    """Here right and wrong answers are scored, too: a worker takes seconds to import reasoning-gym."""
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = ReasoningGym(ReasoningGymSettings(dataset="chain_sum", time_limit=1.0, workers=1, options=options))
    example = task.example("train", 5)
    found = re.search(r"(\d) ([-+]) (\d)", example.prompt)
    assert found is not None
    left, op, right = found.groups()
    answer = str(int(left) + int(right) if op == "+" else int(left) - int(right))
    assert [task.score(example, text) for text in (answer, f" {answer}\n", "no idea")] == [1.0, 1.0, 0.0]
    survive(task, [*NESTED[:1], *BACKTRACKING[:1], *TERMINAL[::3], *FORMATS[::3], *payloads(canary)], canary)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_list_of_data_sets_that_execute_is_what_trying_them_gives(tmp_path: Path) -> None:
    factory = pytest.importorskip("reasoning_gym").factory
    workers = Workers(AnyDataSet(), 2, 2.0)
    executes = set()
    for name in sorted(factory.DATASETS.keys() - {"composite"}):  # a data set of data sets is what those are
        folder = tmp_path / name
        folder.mkdir()
        made = factory.create_dataset(name, seed=0, size=3)
        workers.score([("", text, (name, made[index])) for index in range(3) for text in payloads(folder)])
        if list(folder.iterdir()):
            executes.add(name)
    workers.close()
    assert executes | {"composite"} == EXECUTING
