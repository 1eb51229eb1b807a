"""Hostile completions for every scorer that ships: none hangs, none is executed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlstab.config.settings import JsonlSettings, ReasoningGymSettings
from rlstab.errors import OutOfRange
from rlstab.tasks import Chain, Countdown, Jsonl, ReasoningGym, Task
from rlstab.tasks.reasoning_gym import EXECUTING
from rlstab.tasks.rewards import Scores, score
from rlstab.tasks.scoring import Workers
from tests.tasks.acts import AnyDataSet
from tests.tasks.hostile import BACKTRACKING, FORMATS, NESTED, TERMINAL, hostile, payloads

LIMIT = 1.0


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    folder = tmp_path / "canary"
    folder.mkdir()
    return folder


def jsonl(folder: Path, **settings: Any) -> Jsonl:
    path = folder / "one.jsonl"
    path.write_text('{"prompt": "?", "answer": "1"}\n')
    return Jsonl(JsonlSettings(path=str(path), eval_path=str(path), time_limit=LIMIT, **settings))


def gym(dataset: str, **settings: Any) -> ReasoningGym:
    pytest.importorskip("reasoning_gym")
    return ReasoningGym(ReasoningGymSettings(dataset=dataset, time_limit=LIMIT, **settings))


def test_data_sets_that_execute_completions_are_refused() -> None:
    pytest.importorskip("reasoning_gym")
    for name in EXECUTING:
        with pytest.raises(OutOfRange, match=rf"task\.dataset: .*'{name}' executes completions"):
            gym(name)


def survive(task: Task, completions: Sequence[str], canary: Path) -> Scores:
    """Score them all; each gets a number, in bounded time, and none of them makes its file."""
    example = task.example("train", 0)
    found = score(task, [example] * len(completions), completions)
    assert len(found.rewards) == len(completions)
    assert all(math.isfinite(one) for one in found.rewards.tolist())
    assert all(found.rewards[place] == 0 for place in found.timed_out)
    assert list(canary.iterdir()) == []
    assert not any(set(map(chr, [*range(9), *range(11, 32), 127, *range(128, 160)])) & set(one) for one in found.errors)
    return found


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_payloads_would_act(canary: Path) -> None:
    for one in payloads(canary):
        try:
            eval(one)
        except Exception:
            continue
    assert len(list(canary.iterdir())) >= 20


@pytest.mark.parametrize("make", [Countdown, Chain, lambda folder: jsonl(folder)], ids=["countdown", "chain", "exact"])
def test_scorers_in_this_process(make: Any, canary: Path) -> None:
    task = make(canary.parent) if make not in (Countdown, Chain) else make()
    assert task.workers is None
    assert set(survive(task, hostile(canary), canary).rewards.tolist()) <= {0.0, 1.0}


def test_patterns(canary: Path) -> None:
    completions = hostile(canary)
    assert survive(jsonl(canary.parent, answer_pattern="#### (.+)"), completions, canary).timed_out == []
    found = survive(jsonl(canary.parent, answer_pattern="^((?:a+)+)$"), completions, canary)
    assert [completions[place][:3] for place in found.timed_out] == ["aaa", "aaa"]


def test_some_for_math_verify(canary: Path) -> None:
    pytest.importorskip("math_verify")
    found = survive(
        jsonl(canary.parent, scorer="math_verify"), [*NESTED[:3], *TERMINAL, *FORMATS, *payloads(canary)], canary
    )
    assert len(found.timed_out) >= 1


def test_some_for_a_data_set_of_reasoning_gym(canary: Path) -> None:
    survive(gym("chain_sum"), [*NESTED, *BACKTRACKING, *TERMINAL, *FORMATS, *payloads(canary)], canary)


@pytest.mark.slow
def test_all_for_math_verify(canary: Path) -> None:
    pytest.importorskip("math_verify")
    assert survive(jsonl(canary.parent, scorer="math_verify"), hostile(canary), canary).timed_out


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
        workers.score([((name, {}, made[index]), text) for index in range(3) for text in payloads(folder)])
        if list(folder.iterdir()):
            executes.add(name)
    workers.close()
    assert executes | {"composite"} == EXECUTING
