"""Run folders: who may write there, what replaces what, what a full disk costs, what a start that fails leaves."""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from rlstab.cli import main
from rlstab.config import RunConfig
from rlstab.errors import ConfigError
from tests.train import own
from tests.train.forks import Forks, log_of
from tests.train.runs import (
    checkpoints,
    differences,
    file_of,
    forget_newest,
    go,
    left,
    lines,
    long,
    number,
    of_user,
    small,
)


def files(folder: Path) -> dict[str, bytes]:
    """What is in a folder, less the lock."""
    there = (path for path in sorted(folder.rglob("*")) if path.is_file() and "lock" not in path.name)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in there}


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of another seed leaves that replaces none."""
    out = tmp_path_factory.mktemp("new") / "run"
    go(another(out))
    return left(out)


def another(out: Path) -> RunConfig:
    """Two rollouts of another seed, with a checkpoint after each."""
    return long(out, seed=1, optimisation__rollouts=2, tracking__checkpoint_every=1)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A finished run, with files of a user in its folders."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for name in ("notes.txt", "checkpoints/notes.txt", "plots/reward.svg"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    return out


def mine(out: Path) -> list[str]:
    """The user's files that are there as they were."""
    return [name for name, data in files(out).items() if data == b"mine"]


def aside(out: Path) -> list[Path]:
    """Runs that were replaced and wait for the first checkpoint of the new one."""
    return [path.parent for path in out.rglob("config.yaml") if path.parent != out]


MINE = ["checkpoints/notes.txt", "notes.txt", "plots/reward.svg"]


def test_a_folder_that_holds_a_run_is_left_alone_without_a_word(run: Path) -> None:
    before = files(run)
    with pytest.raises(ConfigError, match=r"--resume.*--overwrite"):
        go(long(run))
    assert files(run) == before


def test_overwrite_leaves_a_folder_alone_that_holds_no_run(tmp_path: Path) -> None:
    """Files with the names that a run writes may belong to someone else."""
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        go(long(tmp_path), overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"metrics.jsonl": b"mine"}


class Breaks(own.Graded):
    """Its run ends with an error in the second rollout, for which there are no problems once the first is scored."""

    scored = False

    def score(self, example: Any, completion: str) -> float:
        self.scored = True
        return super().score(example, completion)

    def example(self, split: Any, index: int) -> Any:
        if self.scored and split == "train" and index >= 2:
            raise RuntimeError("no more examples")
        return super().example(split, index)


def test_a_run_that_is_replaced_waits_until_the_new_one_can_go_on(run: Path, new: dict[str, Any]) -> None:
    """And nothing of the user is replaced."""
    before = left(run)
    with pytest.raises(RuntimeError, match="no more examples"):
        go(long(run, seed=1), overwrite=True, task=Breaks())
    assert mine(run) == MINE
    assert [differences(path, before) for path in aside(run)] == [[]]
    go(another(run), overwrite=True)
    assert aside(run) == []
    assert differences(run, new) == []
    assert mine(run) == MINE


def test_checkpoints_may_be_a_link_to_a_folder_of_another_disk(
    tmp_path: Path, whole: Path, new: dict[str, Any]
) -> None:
    memory = Path("/dev/shm")
    out, far = tmp_path / "run", (memory if os.access(memory, os.W_OK) else tmp_path) / f"far-{os.getpid()}"
    for folder in (out, far):
        folder.mkdir()
    try:
        (out / "checkpoints").symlink_to(far)
        shutil.copytree(whole, out, dirs_exist_ok=True)
        assert {number(path) for path in far.iterdir()} == {2, 4}
        go(another(out), overwrite=True)
        forget_newest(out)
        go(another(out), resume=True)
        assert differences(out, new) == []
        assert (out / "checkpoints").is_symlink()
        assert {number(path) for path in far.iterdir()} == {1, 2}
    finally:
        shutil.rmtree(far)


@pytest.mark.parametrize("size", [200_000, *(pytest.param(size, marks=pytest.mark.slow) for size in (200, 4000))])
def test_a_full_disk_is_one_line_and_costs_nothing(size: int, forks: Forks, whole: Path, tmp_path: Path) -> None:
    """No file can grow beyond a size: that of weights and of an optimizer's state, of a configuration, of records."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    forget_newest(out)
    before = {name: data for name, data in files(out).items() if name.startswith("checkpoints/")}
    (said,) = forks.does(file_of(long(out)), 1, "limited", size=size, resume=True).counted
    assert said.startswith(("CheckpointError: ", "ConfigError: ")), said
    assert "\n" not in said
    assert str(out) in said or f"{tempfile.gettempdir()}/rlstab-" in said  # in which a run first tries what it saves
    now = files(out)
    assert {name: now.get(name) for name in before} == before
    assert not [name for name in now if name.startswith("checkpoints/") and name not in before], "half a file"
    go(long(out), resume=True)
    assert differences(out, left(whole)) == []


def test_a_disk_that_is_full_while_a_run_is_replaced_costs_neither(forks: Forks, run: Path) -> None:
    before = left(run)
    (said,) = forks.does(file_of(long(run, seed=1)), 1, "limited", size=200_000, overwrite=True).counted
    assert said.startswith(("CheckpointError: ", "ConfigError: ")), said
    assert [differences(path, before) for path in aside(run)] == [[]]
    assert mine(run) == MINE


def test_a_second_process_is_refused(forks: Forks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    file = file_of(small(out, task=of_user("Slow"), optimisation__rollouts=100_000))
    (process,) = forks.starts(file, 1, "command")  # it does not end by itself
    try:
        while len(lines(out / "metrics.jsonl")) < 3:
            assert process.is_alive(), log_of(file, 0).read_text()
            time.sleep(0.01)
        for options in ([], ["--resume"], ["--overwrite"]):
            assert main(["train", str(file), *options]) == 2
            said = capsys.readouterr().err
            assert said.startswith("ConfigError: ")
            assert str(out) in said
            assert said.count("\n") == 1
        process.terminate()
        process.join()
    finally:
        process.kill()
    assert process.exitcode == 128 + signal.SIGTERM
    said, newest = log_of(file, 0).read_text(), checkpoints(out)[-1]
    assert lines(out / "metrics.jsonl")[-1]["rollout"] == number(newest)
    assert all(text in said.splitlines()[-1] for text in (str(newest), f"{file} --resume"))
    assert "Traceback" not in said
    # the lock died with its process
    more = small(out, task=of_user("Slow"), optimisation__rollouts=number(newest) + 1)
    assert go(more, resume=True).records[-1]["rollout"] == number(newest) + 1
