"""Hostile completions for every scorer that ships: none hangs, none is executed outside a sandbox."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlstab.errors import ScorerError
from rlstab.tasks import Chain, Countdown, Example, Jsonl, ReasoningGym, Split, Task
from rlstab.tasks.reasoning_gym import executing
from rlstab.tasks.scores import Scores, score
from rlstab.tasks.scoring import GRACE, START, Workers
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
    return Jsonl(path, path, time_limit=LIMIT, **settings)


def gym(dataset: str, **settings: Any) -> ReasoningGym:
    pytest.importorskip("reasoning_gym")
    try:
        return ReasoningGym(dataset, time_limit=LIMIT, execute_completions=dataset in executing(), **settings)
    except ScorerError as error:
        pytest.skip(str(error))


def survive(task: Task, completions: Sequence[str], canary: Path) -> Scores:
    """Score them all; each gets a number, in bounded time, and none of them makes its file."""
    example = task.example("train", 0)
    start = time.monotonic()
    found = score(task, [example] * len(completions), completions)
    seconds = time.monotonic() - start
    executed = list(canary.iterdir())
    print(
        f"{task.name}: {len(completions)} completions in {seconds:.1f} s, {len(found.timed_out)} cut off at "
        f"{LIMIT:g} s, {len(found.errors)} errors, {len(executed)} executed"
    )
    assert len(found.rewards) == len(completions)
    assert all(math.isfinite(one) for one in found.rewards.tolist())
    assert all(found.rewards[place] == 0 for place in found.timed_out)
    assert seconds < START + len(completions) * (LIMIT + GRACE)
    assert executed == []
    assert not any(set(map(chr, [*range(9), *range(11, 32), 127, *range(128, 160)])) & set(one) for one in found.errors)
    return found


def test_there_are_enough_of_them(canary: Path) -> None:
    found = hostile(canary)
    assert len(set(found)) == len(found) == 254
    print(f"{len(found)} hostile completions, {len(payloads(canary))} of them payloads")


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
    example, slowest = task.example("train", 0), 0.0
    for one in hostile(canary):
        start = time.monotonic()
        assert task.score(example, one) in (0.0, 1.0)
        slowest = max(slowest, time.monotonic() - start)
    print(f"{task.name}: the slowest took {slowest:.3f} s")
    assert slowest < LIMIT
    survive(task, hostile(canary), canary)


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


def test_some_for_a_data_set_that_executes(canary: Path) -> None:
    survive(gym("n_queens"), [NESTED[1], *TERMINAL[:5], *FORMATS[:5], *payloads(canary)], canary)


@pytest.mark.slow
def test_all_for_math_verify(canary: Path) -> None:
    pytest.importorskip("math_verify")
    assert survive(jsonl(canary.parent, scorer="math_verify"), hostile(canary), canary).timed_out


class OneOfMany:
    """A data set of reasoning-gym, scored by workers that it shares with others."""

    keeps_special_tokens = False
    size: ClassVar[dict[Split, int | None]] = {"train": None, "eval": None}

    def __init__(self, name: str, workers: Workers) -> None:
        self.name, self.workers = name, workers

    def example(self, split: Split, index: int) -> Example:
        made = importlib.import_module("reasoning_gym.factory").create_dataset(self.name, seed=0, size=index + 1)
        return Example(made[index]["question"], (self.name, {}, made[index]))

    def score(self, example: Example, completion: str) -> float:
        return self.workers.score_one(example.answer, completion)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_all_for_every_data_set_of_reasoning_gym(canary: Path) -> None:
    factory = pytest.importorskip("reasoning_gym").factory
    names = sorted(factory.DATASETS.keys() - {"composite"})
    completions = hostile(canary)
    plain, sandboxed = (Workers(AnyDataSet(), 2, LIMIT, sandboxed=one) for one in (False, True))
    sandboxed.start()
    scores = [survive(OneOfMany(one, sandboxed if one in executing() else plain), completions, canary) for one in names]
    cut_off = sum(len(one.timed_out) for one in scores)
    print(f"{len(names)} data sets x {len(completions)} completions: 0 hangs, 0 executed, {cut_off} cut off")
    assert len(names) >= 105
    plain.close()
    sandboxed.close()
