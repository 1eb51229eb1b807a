"""A run that was killed, stopped or cut short continues as if nothing had happened, bit for bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlstab.errors import CheckpointError
from rlstab.train import Stopped, checkpoint
from tests.train import own
from tests.train.forks import Forks
from tests.train.runs import (
    ADAPTER,
    ALIKE,
    ROOT,
    SMOOTH,
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
    long,
    metrics,
    number,
    of_user,
    small,
)

KINDS: dict[str, dict[str, Any]] = {
    "stages, branches, refills, a queue of two, a sampler of fewer bits": {
        **STAGED,
        "rollout__staleness": 2,
        "rollout__precision": "int8",
        "optimisation__precision": "bf16",
    },
    "turns, a queue": {
        "task": of_user("Talking"),
        "rollout__stop": "=",
        "rollout__max_new_tokens": 24,
        "rollout__staleness": 1,
        "objective": [*STATED, "turn_credit"],
        "stages": ["gigpo", {"name": "dynamic_sampling", "max_refills": 1}],
    },
    "an adapter with a reference, a state of the objective, a schedule": {
        **ADAPTER,
        "objective": [*STATED, {"name": "kl", "coefficient": 0.1}],
        "optimisation__schedule": "cosine",
        "optimisation__warmup_optimizer_steps": 2,
        "optimisation__weight_decay": 0.1,
    },
}
SELDOM: dict[str, dict[str, Any]] = {
    "a pace": {"stages": [{"name": "paced", "pool": 12}]},
    "a teacher": {"stages": [{"name": "goldilocks_teacher", "pool": 12, "candidates": 3, "window": 8}]},
}


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SELDOM)])
def test_a_run_that_lost_its_newest_checkpoint_ends_as_the_whole_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had recorded after the checkpoint is cut off and made again; moments are in one file, or in several."""
    out, settings = tmp_path / "run", (KINDS | SELDOM)[kind]
    monkeypatch.setattr(checkpoint, "SHARD", "100KB")
    go(long(out, **settings))
    whole = left(out)
    files = len([name for name in whole if name.startswith("4/optimizer")])
    assert files == 1 if "model__adapter" in settings else files > 2
    forget_newest(out)
    assert [number(path) for path in checkpoints(out)] == [2]
    stray = checkpoints(out)[-1] / "optimizer-copy.safetensors"
    stray.write_bytes(b"a file that the trainer did not write")
    go(long(out, **settings), resume=True)
    stray.unlink()
    assert differences(out, whole) == []
    assert [record["rollout"] for record in metrics(out)][-3:] == [2, 3, 4]
    assert whole["dump"]


@pytest.mark.parametrize(
    ("engine", "processes"),
    [pytest.param(*job, marks=pytest.mark.slow) for job in (("auto", 1), ("ddp", 2), ("fsdp2", 2))],
)
def test_after_the_kill_of_all_ranks_the_run_goes_on_bit_for_bit(
    engine: str, processes: int, forks: Forks, tmp_path: Path
) -> None:
    """Before any checkpoint, and in the middle of a rollout after the first one."""
    settings, out = {**STAGED, "task": of_user("Slow"), "engine": engine}, tmp_path / "run"
    forks.does(file_of(long(tmp_path / "whole", **settings)), processes)
    file = file_of(long(out, **settings))
    for kill_at in ((1, 0), (4, 2)):
        assert forks.tries(file, processes, kill_at=kill_at, resume=True).codes == [-signal.SIGKILL] * processes
    assert [number(path) for path in checkpoints(out)] == [2]
    forks.does(file, processes, resume=True)
    assert about(out)["processes"] == processes
    assert differences(out, left(tmp_path / "whole")) == []


@pytest.mark.slow
def test_after_any_of_300_kills_a_run_goes_on_bit_for_bit() -> None:
    """At aimed and at random moments, runs with stages, staleness and LoRA among them."""
    command = [sys.executable, "-m", "tests.train.kills", "300", "0"]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=True).stdout)
    print(told)
    assert told["failures"] == []
    assert told["kills"] >= 300
    assert all(count > 50 for count in told["of"].values())


CHANGES = [
    (("fsdp2", 2), ("auto", 1)),
    (("auto", 1), ("fsdp2", 2)),
    (("ddp", 2), ("fsdp2", 3)),
    (("fsdp2", 3), ("ddp", 2)),
]

#: Rollouts wait in a queue.
QUEUED = {"rollout__staleness": 1, "rollout__prompts": 4, **SMOOTH}


@pytest.mark.parametrize(
    ("before", "after"),
    [CHANGES[0], *(pytest.param(*change, marks=pytest.mark.slow) for change in CHANGES[1:])],
    ids=str,
)
def test_a_run_goes_on_in_another_number_of_processes(
    before: tuple[str, int], after: tuple[str, int], forks: Forks, tmp_path: Path
) -> None:
    go(long(tmp_path / "whole", **QUEUED))
    out = tmp_path / "run"
    for (engine, processes), code in ((before, -signal.SIGKILL), (after, 0)):
        file = file_of(long(out, **QUEUED, task=of_user("Slow"), engine=engine))
        done = forks.tries(file, processes, kill_at=(0, 2) if code else None, resume=not code)
        assert done.codes == [code] * processes, "\n".join(done.said)
        assert about(out)["processes"] == processes
    assert [record["rollout"] for record in metrics(out)] == [0, 1, 2, 3, 4]
    assert apart(tmp_path / "whole", out) <= ALIKE


def copied(whole: Path, out: Path) -> Path:
    """The folder of a finished run, at another path."""
    shutil.copytree(whole, out)
    return out


def test_a_finished_run_stays_and_a_longer_one_goes_on(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(long(out, optimisation__rollouts=2))
    before = left(out)
    go(long(out, optimisation__rollouts=2), resume=True)
    assert differences(out, before) == []
    go(long(out), resume=True)
    mine, theirs = (
        [{key: value for key, value in record.items() if "eval" not in key} for record in metrics(folder)[1:]]
        for folder in (out, whole)
    )
    assert mine == theirs
    assert apart(out, whole) == 0


def test_what_may_not_change_is_named(whole: Path, tmp_path: Path) -> None:
    out, before = copied(whole, tmp_path / "run"), left(whole)
    changed: dict[str, dict[str, Any]] = {
        r"optimisation\.lr": {"optimisation__lr": 0.5},
        "objective": {"objective": ["clip_higher"]},
        "seed": {"seed": 2},
        r"rollout\.group": {"rollout__group": 8},
        "stages": {"stages": [{"name": "uniform", "pool": 12}]},
        r"model\.adapter": {"model__adapter": {"r": 2}},
        "task": {"task": {"name": "countdown"}},
        "reward": {"reward": [{"function": "task", "weight": 2.0}]},
    }
    for name, change in changed.items():
        with pytest.raises(CheckpointError, match=name) as caught:
            go(long(out, **{"optimisation__rollouts": 6, **change}), resume=True)
        assert "\n" not in str(caught.value), name
        assert differences(out, before) == [], name
    same = {"optimisation__micro_batch_size": 2, "rollout__batch_size": 3, "evaluation__every": 0}
    assert len(go(long(out, optimisation__rollouts=5, **same), resume=True).records) == 6


def test_functions_of_the_user_have_to_be_given_again_and_no_run_whose_rollouts_wait_is_lengthened(
    tmp_path: Path,
) -> None:
    objective, settings = ["clip_higher", of_user("WeighPlaces", signal="places")], {"rollout__staleness": 1}
    settings |= {"optimisation__rollouts": 3}
    go(long(tmp_path, objective, **settings), signals={"places": own.places})
    whole = left(tmp_path)
    forget_newest(tmp_path)
    with pytest.raises(CheckpointError, match=r"places"):
        go(long(tmp_path, objective, **settings), resume=True, signals={"places": own.poison})
    with pytest.raises(CheckpointError, match=r"optimisation\.rollouts"):
        go(long(tmp_path, objective, rollout__staleness=1), resume=True, signals={"places": own.places})
    go(long(tmp_path, objective, **settings), resume=True, signals={"places": own.places})
    assert differences(tmp_path, whole) == []


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


def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_goes_on(whole: Path, tmp_path: Path) -> None:
    """In the fourth rollout, and in the first one."""
    handlers = [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)]
    for which, at, rollouts in ((signal.SIGINT, 36, (3, 4)), (signal.SIGTERM, 7, (0, 1))):
        out = tmp_path / f"{which.name} {at}"
        task = Signalling(at, lambda which=which: os.kill(os.getpid(), which))  # type: ignore[misc]  # mypy infers no type of a lambda's default
        with pytest.raises(Stopped) as caught:
            go(long(out), task=task)
        assert isinstance(caught.value, KeyboardInterrupt)
        assert "--resume" not in str(caught.value), "that is for the command line to say"
        newest = checkpoints(out)[-1:]
        assert caught.value.checkpoint == (newest[0] if newest else None), "nothing before the first rollout"
        done = number(newest[0]) if newest else 0
        assert metrics(out)[-1]["rollout"] == done
        assert done in rollouts
        assert [signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)] == handlers
        go(long(out), resume=True, task=Signalling(-1, lambda: None))
        assert [name for name in differences(out, left(whole)) if not name.startswith(("2/", "3/"))] == []


def test_a_handler_of_the_caller_stays(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda which, frame: seen.append(which))
    try:
        go(small(tmp_path / "run"), task=Signalling(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert [number(path) for path in checkpoints(tmp_path / "run")] == [2]
