"""Run folders: who may write there, what replaces what, what a start that fails leaves, how a signal ends a run."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rlstab.train.journal import cut_after, line, read
from rlstab.train.manifest import Manifest, clear
from rlstab.train.stopping import AGAIN, Stopped

from rlstab.cli import main
from rlstab.config import dump_run, run_hash
from rlstab.errors import CheckpointError, ConfigError, DataError, ModelError
from rlstab.train import asking, checkpoint, durable, loop
from rlstab.train.run_folder import RunFolder
from tests.train.damages import BEFORE, ON, REFUSE, kinds, of_another_run
from tests.train.kills import Graded, left, small
from tests.train.runs import go


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "build_task", lambda settings: Graded())


def files(folder: Path) -> dict[str, bytes]:
    """What is in a folder."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def opened(out: Path, **changes: Any) -> RunFolder:
    """As a run opens it that would continue it."""
    return RunFolder(small(out, **changes), {"signals": [], "advantages": None}, resume=True, overwrite=False)


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "build_task", lambda settings: Graded())
        out = tmp_path_factory.mktemp("whole") / "run"
        go(small(out, optimisation__rollouts=4))
        yield out


def test_what_is_done_with_each_kind_of_damage(whole: Path, tmp_path: Path) -> None:
    """As far as a run folder finds it when it is opened; the slow test trains to the end."""
    providers = json.loads((whole / "run.json").read_text())["providers"]
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis").write_text("mine")
    out, count, wrong = tmp_path / "run", 0, []
    for damage in kinds():
        if damage.late:
            continue
        count += 1
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        damage.do(out)
        try:
            folder = RunFolder(small(out), providers, resume=True, overwrite=False)
        except (CheckpointError, ConfigError) as error:
            done, said = REFUSE, str(error).replace("\n", " TWO LINES ")
        else:
            folder.close()
            assert folder.start is not None
            done, said = (ON if folder.start.name == "rollout-000004" else BEFORE), "\n".join(folder.said)
            done = ON if damage.name == "the newest checkpoint is a link to where it was moved" else done
        if done != damage.done or damage.says not in said or "TWO LINES" in said:
            wrong.append((damage.name, done, said))
    assert wrong == []
    print(f"{count} kinds of damage")
    assert count >= 100
    assert (tmp_path / "others" / "thesis").read_text() == "mine"


@pytest.mark.slow
def test_a_damaged_run_is_trained_to_the_same_end_or_refused() -> None:
    ran = subprocess.run([sys.executable, "-m", "tests.train.damages"], capture_output=True, text=True, check=False)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert '"failures": []' in ran.stdout
    assert int(ran.stdout.rpartition('"kinds": ')[2].partition(",")[0]) >= 100


def test_a_full_disk_is_said_in_one_line_and_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = tmp_path / "run", list[str]()
    go(small(out, optimisation__rollouts=4))
    before = files(out / "checkpoints" / "rollout-000004")
    write, room = os.write, [0]

    def full(handle: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= 1
        return write(handle, data)

    for place in range(1, 40):
        room[0] = place
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            try:
                go(small(out), resume=True)
            except (ConfigError, CheckpointError) as error:
                said.append(str(error))
            else:
                break
        for one in checkpoint.checkpoints(out / "checkpoints"):
            checkpoint.verify(one)
        assert files(out / "checkpoints" / "rollout-000004") == before
    wanted = r"\S+ cannot be written: no space left on device\. Mend that and continue with --resume, or set another tr"
    assert [text for text in said if not re.match(wanted, text) or "\n" in text] == []
    places = len(said)
    assert places >= 5, "places where the disk was full"
    assert checkpoint.checkpoints(out / "checkpoints")[-1].name == "rollout-000005"


@pytest.mark.parametrize("out", ["file", "file/run", "\0", "x" * 300])
def test_a_place_that_cannot_hold_a_run_is_said(out: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"cannot be written: (file exists|not a directory|file name too long)|is not a path"
    ):
        go(small(tmp_path / out))
    assert files(tmp_path) == {"file": b"mine"}


def test_weights_that_cannot_be_written_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, folder: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))

    monkeypatch.setattr("rlstab.train.policy.Policy.save", fails)
    with pytest.raises(CheckpointError, match=r"rollout-000002 cannot be written: read-only file system\. Mend"):
        go(small(tmp_path / "run"))
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    go(small(out, optimisation__rollouts=4))
    before, sum_of = files(out), checkpoint._sum_of

    def fails(path: Path) -> str:
        if path.name == "model.safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return sum_of(path)

    monkeypatch.setattr(checkpoint, "_sum_of", fails)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: input/output error\. Mend that, or"):
        go(small(out), resume=True)
    assert files(out) == before


# -- records ---------------------------------------------------------------------------------------------------------


def test_records_are_cut_after_a_rollout(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = b'{"rollout": 1}\nrubbish\n{"step": 2, "steps/skipped": 1}\n'
    path.write_bytes(kept + b'{"rollout": 3}\nrubbish\n\0\0\0\n{"rollout": 4')
    assert read(path) == (
        [{"rollout": 1}, {"rollout": 2, "optimizer_steps/skipped": 1}, {"rollout": 3}],
        [2, 5, 6],
    )
    cut_after(path, 2)
    assert path.read_bytes() == kept
    inode = path.stat().st_ino
    cut_after(path, 2)
    assert path.stat().st_ino == inode, "what does not change is not written"
    assert [one.name for one in tmp_path.iterdir()] == ["metrics.jsonl"]
    cut_after(tmp_path / "nothing", 2)


def test_a_number_that_is_none_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Graded):
        def score(self, example: Any, completion: str) -> float:
            return math.nan

    assert line({"rollout": 1, "a": math.inf, "b": 0.5}) == '{"rollout": 1, "a": null, "b": 0.5}\n'
    monkeypatch.setattr(loop, "build_task", lambda settings: Odd())
    result = go(small(tmp_path / "run", optimisation__rollouts=1))

    def refuse(text: str) -> None:
        raise AssertionError(f"bare {text}")

    for name in ("metrics.jsonl", "samples.jsonl"):
        for text in (tmp_path / "run" / name).read_text().splitlines():
            json.loads(text, parse_constant=refuse)
    assert '"reward/mean": null' in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "reward/mean" not in result.records[-1]


def test_records_are_cut_only_when_there_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    go(small(out))
    shutil.rmtree(out / "checkpoints" / "rollout-000005")
    manifest = Manifest.read(out)
    assert manifest is not None
    before = (out / "metrics.jsonl").read_bytes()

    def fails(*arguments: Any, **options: Any) -> None:
        raise DataError("no prompt")

    with monkeypatch.context() as patched:
        patched.setattr(asking, "sample", fails)
        with pytest.raises(DataError):
            go(small(out), resume=True)
    assert (out / "metrics.jsonl").read_bytes() == before
    go(small(out), resume=True)
    assert [one["rollout"] for one in read(out / "metrics.jsonl")[0]] == [0, 1, 2, 3, 4, 5]


# -- identity --------------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_id_and_its_checkpoints_bear_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(small(out, optimisation__rollouts=2))
    first = Manifest.read(out)
    assert first is not None
    config = (out / "config.yaml").stat().st_ino
    go(small(out, optimisation__rollouts=2), resume=True)
    assert (out / "config.yaml").stat().st_ino == config, "nothing is rewritten that did not change"
    go(small(out, optimisation__rollouts=4), resume=True)
    after = Manifest.read(out)
    assert after is not None
    assert after.run_id == first.run_id == json.loads((out / "run.json").read_text())["run_id"]
    assert after.run_hash == run_hash(small(out, optimisation__rollouts=4)) != first.run_hash
    kept = checkpoint.checkpoints(out / "checkpoints")
    assert [one.name for one in kept] == after.checkpoints == ["rollout-000002", "rollout-000004"]
    assert [checkpoint.owner(one) for one in kept] == [first.run_id] * 2
    index = json.loads((kept[-1] / checkpoint.INDEX).read_text())
    assert set(index["files"]) == {name for name in files(kept[-1]) if name != checkpoint.INDEX}


def test_checkpoints_are_ordered_by_their_number(tmp_path: Path) -> None:
    names = ["step-999999", "rollout-000002", "step-1000000", "rollout-1000001", "rollout-x", "rollout-000003-copy"]
    for name in names:
        (tmp_path / name).mkdir()
    found = [one.name for one in checkpoint.checkpoints(tmp_path)]
    assert found == ["rollout-000002", "step-999999", "step-1000000", "rollout-1000001"]


def test_a_run_without_a_checkpoint_and_with_another_config_is_not_taken_for_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stopped):
        stopped(small(out), after=1, monkeypatch=pytest.MonkeyPatch(), save=False)
    (out / "config.yaml").write_text("")
    folder = opened(out)
    assert folder.said == [f"{out / 'config.yaml'} is missing or damaged; it is written anew"]
    folder.close()
    with pytest.raises(CheckpointError, match=r"because nothing says how it was started: .*is not a mapping. Put back"):
        opened(out, seed=3)


# -- replacing -------------------------------------------------------------------------------------------------------


def test_overwrite_moves_aside_what_the_run_wrote_until_the_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    go(small(out))
    mine = ("notes.txt", "src/code.py", "checkpoints/notes.txt", "checkpoints/rollout-000004/notes.txt", "view.html")
    for name in mine:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    before, was, seen = left(out), Manifest.read(out), []
    assert was is not None
    aside = out / f".replaced-{was.run_id}"
    learn = loop.Learner.learn

    def watched(*arguments: Any) -> Any:
        moved = {**left(out), **(left(aside) if aside.exists() else {})}
        seen.append({name for name in before if moved.get(name) != before[name]})
        return learn(*arguments)

    monkeypatch.setattr(loop.Learner, "learn", watched)
    go(small(out, seed=1), overwrite=True)
    assert seen[:2] == [set(), {"tokens.jsonl", "metrics.jsonl", "samples.jsonl"} & seen[1]]
    now = Manifest.read(out)
    assert now is not None
    assert now.run_id != was.run_id
    places = {**dict.fromkeys(mine, out), "checkpoints/rollout-000004/notes.txt": aside}
    assert {name: (place / name).read_text() for name, place in places.items()} == dict.fromkeys(mine, "mine")
    assert [path.name for path in aside.rglob("*") if path.is_file()] == ["notes.txt"], (
        "of the other run nothing is left"
    )
    assert [one["rollout"] for one in read(out / "metrics.jsonl")[0]] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model__name": "./misspelt"}, ModelError),
        ({"model__name": "./misspelt", "objective": ["clip_higher", "kl"]}, ModelError),
        ({"rollout__max_new_tokens": 100_000}, DataError),
    ],
)
def test_an_overwrite_that_fails_leaves_the_run_as_it_was(
    changes: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    go(small(out, optimisation__rollouts=2))
    before = files(out)
    with pytest.raises(error):
        go(small(out, **changes), overwrite=True)
    assert {name: value for name, value in files(out).items() if name != ".lock"} == {
        name: value for name, value in before.items() if name != ".lock"
    }
    go(small(out, optimisation__rollouts=2), resume=True)


def test_an_overwrite_that_fails_later_says_where_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    go(small(out, optimisation__rollouts=2))
    before = left(out)
    sample, calls = asking.sample, []

    def fails(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise DataError("no prompt")
        return sample(*arguments, **options)

    monkeypatch.setattr(asking, "sample", fails)
    with pytest.raises(DataError) as caught:
        go(small(out, seed=1), overwrite=True)
    (aside,) = out.glob(".replaced-*")
    assert caught.value.__notes__ == [f"the run that was here before is in {aside}"]
    assert left(aside) == before
    with pytest.raises(ConfigError, match="already holds a run"):
        go(small(out, seed=1))
    monkeypatch.undo()
    result = go(small(aside, optimisation__rollouts=3), resume=True)
    assert result.records[-1]["rollout"] == 3, "it can be continued where it is"


def test_overwrite_leaves_alone_what_no_run_of_ours_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "code.py").write_text("mine")
    (tmp_path / "config.yaml").write_text("database: mine")
    before = files(tmp_path)
    for options in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(ConfigError, match=r"has config\.yaml, which no run that rlstab knows of wrote there"):
            go(small(tmp_path), **options)
        assert files(tmp_path) == before
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").unlink()
    go(small(Path(), optimisation__rollouts=1), overwrite=True)
    assert (tmp_path / "src" / "code.py").read_text() == "mine"


def test_overwrite_refuses_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(small(out, optimisation__rollouts=4))
    of_another_run(out)
    before = files(out)
    with pytest.raises(ConfigError, match=r"has checkpoints/rollout-000005, which no run that rlstab knows of wrote"):
        go(small(out), overwrite=True)
    assert files(out) == before


def test_a_run_of_an_older_version_is_replaced_too(tmp_path: Path) -> None:
    out = tmp_path / "run"
    written = Path(__file__).parent.parent / "report" / "written_before" / "runs" / "default" / "stare" / "seed-0"
    shutil.copytree(written, out)
    (out / "notes.txt").write_text("mine")
    before, said = files(out), io.StringIO()
    with pytest.raises(ConfigError, match="already holds a run"):
        go(small(out))
    assert files(out) == before
    with pytest.raises(CheckpointError, match="was written under older names"):
        go(small(out), resume=True)
    assert files(out) == before
    loop.train(small(out), overwrite=True, console=Console(file=said, width=500))
    assert f"{out} was written before runs had an id, a manifest and checksums; they begin now" in said.getvalue()
    assert set(before) - set(files(out)) == set(), "of the names that were there"
    assert {name for name in before if files(out)[name] == before[name]} == {"notes.txt", "bench.json"}


@pytest.mark.parametrize("lost", [[], ["manifest.json"], ["manifest.json", "run.json"]])
def test_what_a_bench_clears_is_what_a_run_wrote(lost: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(small(out, optimisation__rollouts=2))
    for name in lost:
        (out / name).unlink()
    for name in ("bench.json", "checkpoints/notes.txt"):
        (out / name).write_text("{}")
    clear(out)
    assert set(files(out)) == {"bench.json", "checkpoints/notes.txt", ".lock"}
    clear(out)
    assert set(files(out)) == {"bench.json", "checkpoints/notes.txt", ".lock"}


def test_resume_and_overwrite_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    (tmp_path / "f.yaml").write_text(dump_run(small(out)))
    assert main(["train", str(tmp_path / "f.yaml"), "--resume", "--overwrite"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: --resume and --overwrite exclude each other: one continues")
    with pytest.raises(ConfigError, match="exclude each other"):
        go(small(out), resume=True, overwrite=True)
    assert not out.exists()


# -- checkpoints on another disk -------------------------------------------------------------------------------------


@pytest.fixture(params=["this disk", "another disk"])
def linked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A run folder that is to be, whose checkpoints are a link to a folder."""
    place = tmp_path if request.param == "this disk" else Path("/dev/shm")
    if place != tmp_path and (not place.is_dir() or place.stat().st_dev == tmp_path.stat().st_dev):
        pytest.skip("one disk only")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoints").symlink_to(folder)
        yield tmp_path / "run"


def test_checkpoints_may_be_a_link_to_a_folder(linked: Path, tmp_path: Path) -> None:
    go(small(linked, optimisation__rollouts=4))
    there = {one.name for one in (linked / "checkpoints").resolve().iterdir()}
    assert there == {"rollout-000002", "rollout-000004"}
    go(small(linked), resume=True)
    go(small(tmp_path / "whole"))
    for name in ("rollout-000004", "rollout-000005"):
        assert left(linked / "checkpoints" / name) == left(tmp_path / "whole" / "checkpoints" / name)
    assert (linked / "checkpoints").is_symlink()


def test_a_run_whose_checkpoints_are_linked_is_replaced_or_left_as_it_was(linked: Path) -> None:
    go(small(linked, optimisation__rollouts=2))
    (linked / "checkpoints" / "notes.txt").write_text("mine")
    before, far = files(linked), (linked / "checkpoints").stat().st_dev != linked.stat().st_dev
    if far:
        said = (
            f"{linked / 'checkpoints'} leads to another disk, and --overwrite cannot move the checkpoints in it aside."
        )
        with pytest.raises(ConfigError, match=re.escape(said)):
            go(small(linked, seed=1), overwrite=True)
        assert {**files(linked), ".lock": b""} == {**before, ".lock": b""}
        go(small(linked), resume=True)
    else:
        go(small(linked, seed=1), overwrite=True)
        assert "seed: 1" in (linked / "config.yaml").read_text()
    assert checkpoint.checkpoints(linked / "checkpoints")[-1].name == "rollout-000005"
    assert (linked / "checkpoints").is_symlink()
    assert (linked / "checkpoints" / "notes.txt").read_text() == "mine"


def test_what_a_bench_clears_leaves_a_link_and_what_is_not_its_own(linked: Path) -> None:
    go(small(linked, optimisation__rollouts=2))
    (linked / "checkpoints" / "notes.txt").write_text("mine")
    clear(linked)
    assert [one.name for one in (linked / "checkpoints").iterdir()] == ["notes.txt"]


# -- starts that fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"model__name": "./misspelt"}, {"rollout__max_new_tokens": 100_000}])
@pytest.mark.parametrize("there", [True, False])
def test_a_start_that_fails_leaves_nothing(there: bool, changes: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "runs" / "new" / "run"
    if there:
        out.mkdir(parents=True)
        (out / "notes.txt").write_text("mine")
    with pytest.raises((ModelError, DataError)):
        go(small(out, **changes))
    assert files(tmp_path) == ({"runs/new/run/notes.txt": b"mine"} if there else {})
    assert (tmp_path / "runs").exists() == there
    go(small(out, optimisation__rollouts=1))


def test_a_start_that_was_killed_before_its_first_record_does_not_block_another(tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(small(out, optimisation__rollouts=1))
    shutil.rmtree(out / "checkpoints")
    for name in ("metrics.jsonl", "samples.jsonl", "tokens.jsonl"):
        (out / name).unlink()
    go(small(out, optimisation__rollouts=1, seed=2))
    assert "seed: 2" in (out / "config.yaml").read_text()


# -- two processes ---------------------------------------------------------------------------------------------------


def command(file: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "rlstab.cli", "train", str(file), *more]


def running(file: Path, out: Path, records: int = 3) -> subprocess.Popen[str]:
    """A trainer that has written some records."""
    process = subprocess.Popen(command(file), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_text().count("\n") < records:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """The file of a run that does not end by itself."""
    file = tmp_path / "long.yaml"
    file.write_text(dump_run(small(tmp_path / "run", optimisation__rollouts=100_000)))
    return file


def test_a_second_process_is_refused_and_a_signal_ends_the_first_in_order(
    long: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    process = running(long, out)
    try:
        for options in ([], ["--resume"], ["--overwrite"]):
            assert main(["train", str(long), *options]) == 2
            said = capsys.readouterr().err
            assert said == (
                f"ConfigError: {out} is being written by process {process.pid}. Wait for it to end, end it, or set "
                f"another tracking.out.\n"
            )
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    (newest,) = checkpoint.checkpoints(out / "checkpoints")[-1:]
    done = checkpoint.number(newest)
    *progress, said = said.splitlines(keepends=True)
    assert [one for one in progress if not one.startswith("rollout ")] == []
    assert said == (
        f"stopped by SIGTERM after rollout {done} of 100000; the checkpoint is {newest}. Continue with: rlstab train "
        f"{long} --resume\n"
    )
    assert [one["rollout"] for one in read(out / "metrics.jsonl")[0]][-1] == done
    checkpoint.verify(newest)


def test_a_lock_dies_with_its_process(long: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = running(long, out)
    process.kill()
    process.communicate()
    folder = opened(out, optimisation__rollouts=100_000)
    with pytest.raises(ConfigError, match=f"is being written by process {os.getpid()}"):
        opened(out)
    folder.close()
    opened(out).close()


# -- signals ---------------------------------------------------------------------------------------------------------


def stopped(
    run: Any,
    *,
    after: int,
    monkeypatch: pytest.MonkeyPatch,
    at: str = "sample",
    number: int = signal.SIGINT,
    save: bool = True,
) -> None:
    """Train, and send this process a signal when so many rollouts are done, in a phase of the next."""
    owner = loop.Learner if at == "learn" else asking if at == "sample" else loop
    call, calls = getattr(owner, at), []

    def signalled(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == after + 1:
            os.kill(os.getpid(), number)
        return call(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, at, signalled)
        patched.setattr(loop, "build_task", lambda settings: Graded())
        if not save:
            patched.setattr(loop._Loop, "_save", lambda *_, **options: None)
        go(run)


@pytest.mark.parametrize(("at", "done"), [("sample", 3), ("learn", 4)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_a_checkpoint(
    number: int, at: str, done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, handlers = tmp_path / "run", [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Stopped) as caught:
        stopped(small(out), after=3, at=at, number=number, monkeypatch=monkeypatch)
    newest = out / "checkpoints" / f"rollout-{done:06d}"
    name = signal.Signals(number).name
    assert str(caught.value) == f"stopped by {name} after rollout {done} of 5; the checkpoint is {newest}"
    assert (caught.value.number, caught.value.checkpoint) == (number, newest)
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    go(small(out), resume=True)
    go(small(tmp_path / "whole"))
    ours, whole = left(out), left(tmp_path / "whole")
    ours["config.yaml"] = whole["config.yaml"]  # names its folder
    assert ours == whole


def test_a_signal_before_the_first_rollout_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        Stopped, match=r"^stopped by SIGINT before the first rollout was complete; there is no checkpoint"
    ):
        stopped(small(tmp_path / "run"), after=0, at="load_policy", monkeypatch=monkeypatch)
    assert not (tmp_path / "run").exists()


def test_a_signal_while_the_folder_is_looked_at_says_where_the_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    go(small(out, optimisation__rollouts=2))
    before = files(out)
    monkeypatch.setattr(checkpoint, "verify", lambda path: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped) as caught:
        go(small(out), resume=True)
    newest = out / "checkpoints" / "rollout-000002"
    assert str(caught.value) == f"stopped by SIGTERM after rollout 2 of 5; the checkpoint is {newest}"
    assert files(out) == before


def test_a_signal_does_not_remove_the_run_that_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    go(small(out))
    before = left(out)
    train = loop.train
    monkeypatch.setattr("tests.train.runs.train", lambda run, **options: train(run, overwrite=True, **options))
    with pytest.raises(Stopped) as caught:
        stopped(small(out, seed=1), after=1, monkeypatch=monkeypatch)
    (aside,) = out.glob(".replaced-*")
    assert left(aside) == before
    assert caught.value.__notes__ == [f"the run that was here before is in {aside}"]


def test_a_second_signal_ends_a_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # passed on by a launcher: the same one
        time.sleep(AGAIN + 0.1)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(loop.Learner, "learn", twice)
    with pytest.raises(KeyboardInterrupt) as caught:
        go(small(tmp_path / "run"))
    assert not isinstance(caught.value, Stopped)


def test_a_handler_of_the_caller_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        stopped(small(tmp_path / "run"), after=1, number=signal.SIGTERM, monkeypatch=monkeypatch)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


# -- small things ----------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_at_once_and_only_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    durable.write(path, "one")
    inode = path.stat().st_ino
    durable.write(path, "one")
    assert path.stat().st_ino == inode
    (tmp_path / ".f.writing").mkdir()
    durable.write(path, "two")
    assert files(tmp_path) == {"f": b"two"}

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="full"):
        durable.write(path, "three")
    assert path.read_text() == "two"


def test_a_state_is_restored_with_its_tensors(tmp_path: Path) -> None:
    out = tmp_path / "run"
    go(small(out, optimisation__rollouts=2))
    index = json.loads((out / "checkpoints" / "rollout-000002" / checkpoint.INDEX).read_text())
    found = checkpoint.verify(out / "checkpoints" / "rollout-000002")
    assert found.state == index["state"]
    assert found.run is not None
    assert found.run.settings == small(out, optimisation__rollouts=2).model_dump(mode="json")
    assert torch.get_num_threads() == 1
