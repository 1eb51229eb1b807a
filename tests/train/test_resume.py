"""A run that was killed, stopped or cut short goes on as if nothing had happened, bit for bit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlstab.errors import CheckpointError
from rlstab.train import Stopped
from tests.train import own
from tests.train.forks import Forks
from tests.train.runs import (
    ADAPTER,
    ALIKE,
    STAGED,
    STATED,
    about,
    apart,
    checkpoints,
    differences,
    file_of,
    forget_newest,
    go,
    left,
    lines,
    long,
    metrics,
    number,
    of_user,
)

SELECTORS = {
    "uniform": {"name": "uniform", "pool": 12},
    "goldilocks": {"name": "goldilocks", "pool": 12},
    "goldilocks_teacher": {"name": "goldilocks_teacher", "pool": 12, "candidates": 3, "window": 8},
    "paced": {"name": "paced", "pool": 12},
}
KINDS: dict[str, dict[str, Any]] = {
    "a state of the objective, a schedule": {
        "optimisation__schedule": "cosine",
        "optimisation__warmup_optimizer_steps": 2,
        "optimisation__weight_decay": 0.1,
    },
    "stages, branches, refills, a queue": STAGED,
    "an adapter with a reference": {**ADAPTER, "objective": [*STATED, {"name": "kl", "coefficient": 0.1}]},
    "a queue of two and a sampler of fewer bits": {
        "rollout__staleness": 2,
        "rollout__precision": "int8",
        "optimisation__precision": "bf16",
    },
    **{f"selector {name}": {"stages": [settings]} for name, settings in SELECTORS.items()},
}

SELDOM = {f"selector {name}" for name in SELECTORS}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in SELDOM)) for kind in KINDS])
def test_a_run_that_lost_its_newest_checkpoint_ends_as_the_whole_one(kind: str, tmp_path: Path) -> None:
    """What it had recorded after the checkpoint is cut off and made again."""
    out = tmp_path / "run"
    go(long(out, **KINDS[kind]))
    whole = left(out)
    forget_newest(out)
    assert [number(path) for path in checkpoints(out)] == [2]
    go(long(out, **KINDS[kind]), resume=True)
    assert differences(out, whole) == []
    assert [record["rollout"] for record in metrics(out)][-3:] == [2, 3, 4]
    assert whole["tokens.jsonl"]


def test_a_run_that_is_killed_goes_on_bit_for_bit(forks: Forks, tmp_path: Path) -> None:
    """A kill by the system, in the middle of a rollout after the first checkpoint, and one before any checkpoint."""
    go(long(tmp_path / "whole", **STAGED))
    whole, out = left(tmp_path / "whole"), tmp_path / "run"
    file = file_of(long(out, task=of_user("Slow"), **STAGED))
    assert forks.tries(file, kill_at=(1, 0)).codes == [-signal.SIGKILL]
    assert forks.tries(file, kill_at=(4, 2), resume=True).codes == [-signal.SIGKILL]
    assert [number(path) for path in checkpoints(out)] == [2]
    forks.does(file, resume=True)
    assert differences(out, whole) == []


@pytest.mark.slow
def test_after_any_of_300_kills_a_run_goes_on_bit_for_bit(forks: Forks, tmp_path: Path) -> None:
    """At aimed and at random moments, runs with stages, staleness and LoRA among them.

    By hand: ``python -m tests.train.kills 300 0``.
    """
    (told,) = forks.does(tmp_path / "campaign", 1, "campaign", kills=300, seed=0).counted
    print(f"python -m tests.train.kills 300 0: {told}")
    assert told["failures"] == []
    assert told["kills"] >= 300
    assert all(count > 50 for count in told["of"].values())


CHANGES: list[tuple[tuple[str, int], tuple[str, int]]] = [
    (("fsdp2", 2), ("auto", 1)),
    (("auto", 1), ("fsdp2", 2)),
    (("ddp", 2), ("fsdp2", 3)),
    (("fsdp2", 3), ("ddp", 2)),
]


@pytest.fixture(scope="module")
def smooth() -> dict[str, Any]:
    """Rollouts wait in a queue, the objective has a state, and rounding decides little."""
    return {"rollout__staleness": 1, "rollout__prompts": 4, "optimisation__eps": 1e-4, "optimisation__lr": 1e-4}


@pytest.mark.parametrize(
    ("before", "after"),
    [CHANGES[0], *(pytest.param(*change, marks=pytest.mark.slow) for change in CHANGES[1:])],
    ids=str,
)
def test_a_run_goes_on_in_another_number_of_processes(
    before: tuple[str, int], after: tuple[str, int], smooth: dict[str, Any], forks: Forks, tmp_path: Path
) -> None:
    go(long(tmp_path / "whole", **smooth))
    out = tmp_path / "run"
    slow = {"task": of_user("Slow")}
    for (engine, processes), cut in ((before, True), (after, False)):
        file = file_of(long(out, **smooth, **slow, engine=engine))
        done = forks.tries(file, processes, **({"kill_at": (0, 2)} if cut else {"resume": True}))  # type: ignore[arg-type]
        assert done.codes == [-signal.SIGKILL if cut else 0] * processes, "\n".join(done.said)
        assert about(out)["processes"] == processes
    assert [record["rollout"] for record in metrics(out)] == [0, 1, 2, 3, 4]
    assert apart(tmp_path / "whole", out) <= ALIKE


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_after_the_kill_of_all_ranks_the_run_goes_on_bit_for_bit(engine: str, forks: Forks, tmp_path: Path) -> None:
    settings = {**STAGED, "engine": engine}
    forks.does(file_of(long(tmp_path / "whole", **settings)), 2)
    whole, out = left(tmp_path / "whole"), tmp_path / "run"
    file = file_of(long(out, **settings))
    for moment in (1, 3, 4):
        assert forks.tries(file, 2, kill_at=(moment, 0), resume=True).codes == [-signal.SIGKILL] * 2
    forks.does(file, 2, resume=True)
    assert about(out)["processes"] == 2
    assert differences(out, whole) == []


def test_a_finished_run_stays_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    go(long(tmp_path / "whole", optimisation__rollouts=6))
    out = tmp_path / "run"
    go(long(out))
    before = left(out)
    go(long(out), resume=True)
    assert differences(out, before) == []
    go(long(out, optimisation__rollouts=6), resume=True)
    mine, theirs = metrics(out), metrics(tmp_path / "whole")
    assert [{key: value for key, value in record.items() if "eval" not in key} for record in mine[1:]] == [
        {key: value for key, value in record.items() if "eval" not in key} for record in theirs[1:]
    ]
    assert apart(out, tmp_path / "whole") == 0


def test_resume_starts_where_there_is_no_run(tmp_path: Path) -> None:
    assert len(go(long(tmp_path / "run"), resume=True).evaluations) == 3


def test_what_may_not_change_is_named(tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(long(out))
    before = left(out)
    changed: dict[str, dict[str, Any]] = {
        r"optimisation\.lr": {"optimisation__lr": 0.5},
        "objective": {"objective": ["clip_higher"]},
        "seed": {"seed": 2},
        r"rollout\.group": {"rollout__group": 8},
        "stages": {"stages": [{"name": "uniform", "pool": 12}]},
        r"model\.adapter": {"model__adapter": {"r": 2}},
        "task": {"task": {"name": "countdown"}},
    }
    for name, change in changed.items():
        with pytest.raises(CheckpointError, match=name) as caught:
            go(long(out, **{"optimisation__rollouts": 6, **change}), resume=True)
        assert "\n" not in str(caught.value), name
        assert differences(out, before) == [], name
    same = {"optimisation__micro_batch_size": 2, "rollout__batch_size": 3, "evaluation__every": 0}
    assert len(go(long(out, optimisation__rollouts=5, **same), resume=True).records) == 6


def test_a_run_whose_rollouts_wait_is_not_lengthened(tmp_path: Path) -> None:
    go(long(tmp_path, rollout__staleness=1))
    with pytest.raises(CheckpointError, match=r"optimisation\.rollouts"):
        go(long(tmp_path, rollout__staleness=1, optimisation__rollouts=6), resume=True)


def test_functions_of_the_user_have_to_be_given_again(tmp_path: Path) -> None:
    objective = ["clip_higher", of_user("WeighPlaces", signal="places")]
    given: dict[str, Any] = {"signals": {"places": own.places}, "advantages": own.fading}
    go(long(tmp_path / "run", objective), **given)
    whole = left(tmp_path / "run")
    forget_newest(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"fading"):
        go(long(tmp_path / "run", objective), resume=True, signals={"places": own.places})
    go(long(tmp_path / "run", objective), resume=True, **given)
    assert differences(tmp_path / "run", whole) == []


class Signalling(own.Graded):
    """It sends its own process a signal at one of its scores."""

    def __init__(self, at: int, send: Callable[[], None]) -> None:
        super().__init__()
        self.at, self.count, self.send = at, 0, send

    def score(self, example: Any, completion: str) -> float:
        self.count += 1
        if self.count == self.at:
            self.send()
        return super().score(example, completion)


def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_goes_on(tmp_path: Path) -> None:
    settings = {"evaluation__every": 0}
    go(long(tmp_path / "whole", **settings), task=Signalling(-1, lambda: None))
    whole = left(tmp_path / "whole")
    handlers = [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)]
    for which in (signal.SIGINT, signal.SIGTERM):
        out = tmp_path / which.name
        task = Signalling(26, lambda which=which: os.kill(os.getpid(), which))  # type: ignore[misc]
        with pytest.raises(Stopped) as caught:
            go(long(out, **settings), task=task)
        assert isinstance(caught.value, KeyboardInterrupt)
        assert "--resume" not in str(caught.value), "that is for the command line to say"
        newest = checkpoints(out)[-1]
        assert caught.value.checkpoint == newest
        assert lines(out / "metrics.jsonl")[-1]["rollout"] == number(newest) in (3, 4)
        assert [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)] == handlers
        go(long(out, **settings), resume=True, task=Signalling(-1, lambda: None))
        kept = {name: value for name, value in whole.items() if not name[0].isdigit() or name[0] == "4"}
        assert [name for name in differences(out, kept) if not name[0].isdigit() or name[0] == "4"] == []


def test_a_signal_before_the_first_rollout_is_complete_leaves_nothing_to_go_on_from(tmp_path: Path) -> None:
    task = Signalling(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped) as caught:
        go(long(tmp_path / "run", evaluation__every=0), task=task)
    assert caught.value.checkpoint is None or number(caught.value.checkpoint) == 1
    go(long(tmp_path / "run", evaluation__every=0), resume=True, task=Signalling(-1, lambda: None))


def test_a_handler_of_the_caller_stays(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda which, frame: seen.append(which))
    try:
        go(long(tmp_path / "run"), task=Signalling(9, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert len(checkpoints(tmp_path / "run")) == 2
