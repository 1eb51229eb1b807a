"""Benches that run: what is skipped, continued, run again, recorded; and workers that leave with their parent."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
from rich.console import Console

from rlstab.bench import pool
from rlstab.bench.file import load_bench
from rlstab.bench.pool import Worker, least_used
from rlstab.bench.schedule import dry_run, plan_of, run_bench
from rlstab.bench.screen import Screen, clock
from rlstab.bench.worker import ORPHANED
from rlstab.cli import main
from rlstab.config.document import dump
from rlstab.errors import ConfigError
from tests.bench.benches import console, pretend, printed, record, tiny


def test_real_workers_finish_or_fail_and_the_rest_goes_on(tmp_path: Path) -> None:
    settings = {"good": {}, "bad": {"task": {"name": "jsonl", "path": "no.jsonl"}}}
    bench = load_bench(tiny(tmp_path, {"grpo": "clip_higher"}, settings=settings))
    where = console()
    assert run_bench(bench, console=where) == 1
    good, bad = record(tmp_path, "good/grpo/seed-0"), record(tmp_path, "bad/grpo/seed-0")
    assert (good["status"], good["error"], good["run_hash"]) == ("finished", None, bench.runs[0].hash)
    assert 0 < good["cpu_seconds"] < 600
    assert good["seconds"] > 0
    folder = bench.runs[0].folder
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((folder / "run.json").read_text())["threads"] == 1
    assert not (folder / "checkpoints").exists()
    assert bad["status"] == "failed"
    assert bad["error"].startswith("DataError: no.jsonl")
    assert "failed bad/grpo/seed-0: DataError: no.jsonl" in printed(where)
    assert printed(where).endswith(f"{tmp_path}: 1 of 2 runs finished, 1 failed\n")
    about = json.loads((tmp_path / "bench.json").read_text())
    assert (about["name"], about["baseline"], about["hash"], about["threads"]) == ("tiny", "grpo", bench.hash, 1)
    assert load_bench(tmp_path / "bench.yaml").hash == bench.hash


def test_finished_runs_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    bench = load_bench(tiny(tmp_path, {"a": "clip_higher", "b": "s2t"}, seeds=2))
    assert run_bench(bench, console=console()) == 0
    started = json.loads((tmp_path / "bench.json").read_text())["started"]
    monkeypatch.setattr(pool, "COMMAND", ["never started"])
    where = console()
    assert run_bench(bench, console=where) == 0
    assert printed(where) == f"{tmp_path}: 4 of 4 runs finished\n"
    assert json.loads((tmp_path / "bench.json").read_text())["started"] == started


def test_lines_say_what_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    where = console()
    run_bench(load_bench({**tiny(tmp_path, {"a": "clip_higher"}), "about": "One run."}), console=where)
    assert json.loads((tmp_path / "bench.json").read_text())["about"] == "One run."
    assert load_bench(tmp_path / "bench.yaml").about == "One run."
    assert printed(where).splitlines() == [
        "start  default/a/seed-0",
        "[1/1] default/a/seed-0  reward 0.500  entropy 0.250  held out   1 CPU-seconds",
        f"{tmp_path}: 1 of 1 runs finished",
    ]


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [(None, 2, ["0", "1"]), ("3,5", 2, ["3", "5"]), (None, 0, ["all"]), ("", 0, [""]), ("7, -1,2", 1, ["7"])],
)
def test_workers_share_the_gpus_that_are_visible(
    visible: str | None, count: int, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of GPUs is faked, for there may be none; what a worker sees is what its process was told."""
    pretend(monkeypatch)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    bench = load_bench(tiny(tmp_path / "b", {"a": "clip_higher", "b": "s2t"}))
    assert run_bench(bench, console=console()) == 0
    seen = [(one.folder / "gpu").read_text() for one in bench.runs]
    assert sorted(set(seen)) == sorted(names)


def test_the_gpu_of_the_fewest_workers_is_next() -> None:
    running: list[Any] = []
    for _ in range(5):
        running.append(SimpleNamespace(gpu=least_used(["4", "9"], running)))
    assert [one.gpu for one in running] == ["4", "9", "4", "9", "4"]
    assert least_used(["4", "9"], running[1:]) == "4"
    assert least_used(["4", "9"], [running[0], running[2]]) == "9"
    assert least_used([], running) is None


def test_seed_0_of_everything_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    where = console()
    run_bench(load_bench(tiny(tmp_path, {"a": "clip_higher", "b": "s2t"}, seeds=2)), workers=1, console=where)
    started = [line.split()[-1] for line in printed(where).splitlines() if line.startswith("start")]
    assert started == [f"default/{method}/seed-{seed}" for seed in (0, 1) for method in "ab"]


def test_changed_runs_need_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    file = tiny(tmp_path, {"a": "clip_higher", "b": "s2t"})
    run_bench(load_bench(file), console=console())
    changed = load_bench({**file, "methods": {"a": "clip_higher", "b": {"name": "s2t", "max_prob": 0.5}}})
    with pytest.raises(ConfigError) as caught:
        run_bench(changed, console=console())
    assert str(caught.value) == (
        f"{tmp_path} holds 1 finished runs with other settings than this has now: default/b/seed-0. Make them again "
        f"with --overwrite, or keep them and give another folder with --out."
    )
    assert record(tmp_path, "default/b/seed-0")["run_hash"] == load_bench(file).runs[1].hash
    where = console()
    assert run_bench(changed, overwrite=True, console=where) == 0
    assert "start  default/a/seed-0" not in printed(where)
    assert record(tmp_path, "default/b/seed-0")["run_hash"] == changed.runs[1].hash


def test_runs_of_before_say_which_names_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    bench = load_bench(tiny(tmp_path, {"a": "clip_higher"}))
    run_bench(bench, console=console())
    folder = bench.runs[0].folder
    (folder / "bench.json").write_text(json.dumps({**record(tmp_path, "default/a/seed-0"), "run_hash": "of before"}))
    (folder / "config.yaml").write_text("objective: [{name: clip_higher}]\noptimisation: {steps: 2, lr: 0.001}\n")
    with pytest.raises(ConfigError) as caught:
        run_bench(bench, console=console())
    assert (
        "default/a/seed-0. They were written under older names, which changes their hashes: optimisation.steps is "
        "called 'rollouts' now. Make them again with --overwrite, or keep them"
    ) in str(caught.value)


def test_a_folder_of_another_bench_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    run_bench(load_bench(tiny(tmp_path, {"a": "clip_higher"})), console=console())
    before = (tmp_path / "bench.yaml").read_text()
    with pytest.raises(ConfigError) as caught:
        run_bench(load_bench({**tiny(tmp_path, {"b": "s2t"}), "name": "other"}), console=console())
    assert str(caught.value) == (
        f"{tmp_path} holds the bench 'tiny', and this is 'other': their runs would be mixed. Give another folder with "
        f"--out, or call this one 'tiny' too."
    )
    assert (tmp_path / "bench.yaml").read_text() == before


def test_runs_that_the_file_no_longer_names_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    run_bench(load_bench(tiny(tmp_path, {"a": "clip_higher", "b": "s2t"}, seeds=2)), console=console())
    fewer = load_bench(tiny(tmp_path, {"a": "clip_higher"}, seeds=2))
    told = (
        f"{tmp_path} also holds runs that this bench does not name: default/b/seed-0, default/b/seed-1. A report of "
        f"the folder shows them too; remove them if that is not wanted."
    )
    where = console()
    dry_run(fewer, console=where)
    assert printed(where).splitlines()[-1] == told
    assert run_bench(fewer, console=where) == 0
    assert printed(where).splitlines()[-2:] == [told, f"{tmp_path}: 2 of 2 runs finished"]


@pytest.mark.parametrize("out", ["file", "file/inside"])
def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r" cannot be written: .* give another folder with --out\.$"):
        run_bench(load_bench(tiny(tmp_path / out, {"a": "clip_higher"})), console=console())


def test_long_names_are_not_cut_on_a_narrow_screen(tmp_path: Path) -> None:
    names = [f"a-name-that-is-as-long-as-a-folder-may-well-be-{end}" for end in "XY"]
    bench = load_bench(tiny(tmp_path, dict.fromkeys(names, "clip_higher"), settings={one: {} for one in names}))
    planned, live = (Console(file=io.StringIO(), force_terminal=False, width=100) for _ in range(2))
    dry_run(bench, console=planned)
    live.print(Screen(live, bench, bench.runs, [], [], 1)._show())
    assert (printed(planned).count("X"), printed(planned).count("Y")) == (2 + 2 + 1, 2 + 2)  # the baseline stands below
    assert (printed(live).count("X"), printed(live).count("Y")) == (2, 2)  # once as a setting, once as a method


def test_failures_are_kept_until_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    bench = load_bench(tiny(tmp_path, {"fail": "clip_higher", "die": "s2t", "good": "stare"}))
    assert run_bench(bench, console=console()) == 1
    assert record(tmp_path, "default/fail/seed-0")["error"] == "ValueError: bad luck"
    died = record(tmp_path, "default/die/seed-0")
    assert (died["status"], died["error"]) == ("failed", "about to die\nthe worker ended with code 7")
    assert died["cpu_seconds"] is None
    assert record(tmp_path, "default/good/seed-0")["status"] == "finished"
    where = console()
    assert run_bench(bench, console=where) == 1
    assert "start" not in printed(where)
    assert f"{tmp_path / 'bench.yaml'} --retry" in printed(where)
    assert run_bench(bench, retry=True, only=["default/fail"], console=where) == 1
    assert printed(where).count("start  default/fail/seed-0") == 1
    assert "start  default/die" not in printed(where)


def test_a_killed_worker_is_a_failure_with_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    see = Screen.see

    def kill(screen: Screen, running: Sequence[Worker], ended: Sequence[Worker]) -> None:
        for one in running:
            os.kill(one.pid, signal.SIGKILL)
        see(screen, running, ended)

    monkeypatch.setattr(Screen, "see", kill)
    assert run_bench(load_bench(tiny(tmp_path, {"hang": "clip_higher"})), console=console()) == 1
    assert record(tmp_path, "default/hang/seed-0")["error"] == "the worker was ended by SIGKILL"


def test_a_run_that_was_cut_off_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    bench = load_bench(tiny(tmp_path, {"a": "clip_higher", "b": "s2t", "c": "stare"}))
    run_bench(bench, console=console())
    for run, seconds in zip(bench.runs, (10.0, 10.0, None), strict=True):
        values = {**record(tmp_path, run.name), "status": "running", "cpu_seconds": seconds}
        (run.folder / "bench.json").write_text(json.dumps(values))
        if run.method != "b":
            (run.folder / "checkpoints" / "rollout-000001").mkdir(parents=True)
    assert [one.method for one in plan_of(bench.runs, overwrite=False, retry=False).resumed] == ["a", "c"]
    where = console()
    assert run_bench(bench, console=where) == 0
    assert {line for line in printed(where).splitlines() if line.endswith("seed-0")} == {
        "resume default/a/seed-0",
        "start  default/b/seed-0",
        "resume default/c/seed-0",
    }
    resumed = {one.method: (one.folder / "resumed").read_text() for one in bench.runs}
    assert resumed == {"a": "True", "b": "False", "c": "True"}
    used = {one.method: record(tmp_path, one.name)["cpu_seconds"] for one in bench.runs}
    assert used == {"a": 11.0, "b": 1.0, "c": None}


@pytest.mark.parametrize("damage", ["", "{", "[]"])
def test_a_damaged_record_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    pretend(monkeypatch)
    bench = load_bench(tiny(tmp_path, {"a": "clip_higher"}))
    run_bench(bench, console=console())
    (bench.runs[0].folder / "bench.json").write_text(damage)
    assert run_bench(bench, console=console()) == 0
    assert record(tmp_path, "default/a/seed-0")["status"] == "finished"


def test_ctrl_c_stops_the_workers_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    pids: list[int] = []

    def interrupt(screen: Screen, running: Sequence[Worker], ended: Sequence[Worker]) -> None:
        pids.extend(one.pid for one in running)
        raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "see", interrupt)
    (tmp_path / "b.yaml").write_text(dump(tiny(tmp_path / "out", {"hang": "clip_higher"}, seeds=2)))
    where = console()
    assert run_bench(load_bench(tmp_path / "b.yaml"), console=where) == 130
    assert printed(where) == f"stopped; 0 of 2 runs finished. Continue with: rlstab bench {tmp_path / 'b.yaml'}\n"
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert record(tmp_path / "out", "default/hang/seed-0")["status"] == "running"


def test_two_processes_do_not_run_one_bench(tmp_path: Path) -> None:
    bench = load_bench(tiny(tmp_path, {"a": "clip_higher"}))
    with filelock.FileLock(tmp_path / ".lock"), pytest.raises(ConfigError) as caught:
        run_bench(bench, console=console())
    text = f"{tmp_path} is being run by another process. Wait for it, or give another folder with --out."
    assert str(caught.value) == text


def test_a_worker_leaves_when_its_parent_is_gone(tmp_path: Path) -> None:
    (run,) = load_bench(tiny(tmp_path, {"a": "clip_higher"})).runs
    run.folder.mkdir(parents=True)
    (run.folder / "bench.json").write_text('{"status": "running"}')
    program = "import rlstab.bench.worker as w, time; w._train = lambda order: time.sleep(60); w.main()"
    order = {"run": run.config.model_dump(mode="json"), "resume": True, "keep_checkpoints": False}
    line = json.dumps({**order, "seconds": 5.0, "cpu_seconds": 3.0}) + "\n"
    done = subprocess.run([sys.executable, "-c", program], input=line.encode(), timeout=300, check=False)
    assert done.returncode == ORPHANED
    left = record(tmp_path, run.name)
    assert left["status"] == "running"
    assert left["seconds"] >= 5.0
    assert left["cpu_seconds"] > 3.0


def test_only_takes_patterns(tmp_path: Path) -> None:
    bench = load_bench(tiny(tmp_path, {"a": "clip_higher", "b": "s2t"}, seeds=2))
    where = console()
    dry_run(bench, only=["*/b", "default/a/seed-1"], console=where)
    rows = [line.split() for line in printed(where).splitlines() if line.endswith(("32", "64", "96"))]
    assert rows == [
        ["default", "a", "1", "0", "2", "2", "32"],
        ["default", "b", "2", "0", "4", "4", "64"],
        ["all", "3", "0", "6", "6", "96"],
    ]
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError) as caught:
        dry_run(bench, only=["default/c"])
    assert str(caught.value) == (
        "--only default/c: no run matches. Give setting/method or setting/method/seed-0, with * for any. Settings: "
        "default. Methods: a, b."
    )


def test_the_command_makes_one_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pretend(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("b.yaml").write_text(dump(tiny(Path("out"), {"a": "clip_higher", "b": "s2t"}, seeds=2)))
    assert main(["bench", "b.yaml"]) == 0
    command = record(Path("out"), "default/b/seed-1")["command"]
    assert command == "rlstab bench b.yaml --only default/b/seed-1 --out runs/tiny-again"
    assert main(command.split()[1:]) == 0
    assert [path.parent.name for path in Path("runs/tiny-again").rglob("metrics.jsonl")] == ["seed-1"]
    again = record(Path("runs/tiny-again"), "default/b/seed-1")
    assert again["run_hash"] == record(Path("out"), "default/b/seed-1")["run_hash"]
    assert main(["bench", "b.yaml", "--workers", "0"]) == 2
    assert "--workers 0: expected a number of at least 1." in capsys.readouterr().err


def test_the_table_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    settings = {"x": {}, "y": {}}
    bench = load_bench(tiny(tmp_path, {"a": "clip_higher", "fail": "s2t"}, settings=settings, seeds=2))
    where = console()
    where._force_terminal = True
    assert run_bench(bench, console=where) == 1
    shown = printed(where)
    assert "4/8 finished" in shown
    assert "2 failed" in shown
    assert "ValueError: bad luck" in shown


@pytest.mark.parametrize(("seconds", "text"), [(41.6, "42 s"), (185, "3 min 05 s"), (4800, "1 h 20 min")])
def test_times_are_read_by_people(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.slow
def test_a_killed_bench_goes_on_to_the_same_end(tmp_path: Path) -> None:
    file = tiny(tmp_path / "cut", {"a": ["clip_higher", "s2t"]})
    file["base"] |= {"optimisation": {"rollouts": 30, "lr": 1e-3}, "tracking": {"checkpoint_every": 2}}
    (tmp_path / "b.yaml").write_text(dump({**file, "keep_checkpoints": True}))
    bench = load_bench(tmp_path / "b.yaml")
    parent = subprocess.Popen([sys.executable, "-m", "rlstab.cli", "bench", str(tmp_path / "b.yaml")])
    checkpoints = bench.runs[0].folder / "checkpoints"
    while not any(checkpoints.glob("rollout-*")):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    time.sleep(3)
    before = record(bench.out, bench.runs[0].name)
    assert before["status"] == "running"
    assert before["cpu_seconds"] > 0
    left = sorted(path.name for path in checkpoints.glob("rollout-*"))
    time.sleep(3)
    assert sorted(path.name for path in checkpoints.glob("rollout-*")) == left  # nobody trains on
    assert "rollout-000030" not in left
    assert run_bench(bench, console=console()) == 0
    whole = load_bench(tmp_path / "b.yaml", out=tmp_path / "whole")
    assert run_bench(whole, console=console()) == 0

    def metrics(folder: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in one.items() if not key.startswith("seconds/")} for one in lines]

    assert metrics(bench.runs[0].folder) == metrics(whole.runs[0].folder)
    assert (checkpoints / "rollout-000030").exists()
