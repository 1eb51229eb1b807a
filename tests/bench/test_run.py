"""Benches that run: what is skipped, continued, run again, recorded; and workers that leave with their parent."""

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
from rich.console import Console

from rlstab.bench import progress, worker
from rlstab.bench import run as running
from rlstab.bench.file import load_bench
from rlstab.bench.plan import dry_run, plan_of
from rlstab.bench.progress import Screen, last_records
from rlstab.bench.run import run_bench
from rlstab.bench.worker import ORPHANED
from rlstab.cli import main
from rlstab.config import dump_run
from rlstab.config.document import dump
from rlstab.errors import ConfigError, ScorerError
from rlstab.train import checkpoint
from tests.train.forks import forkserver, print_to
from tests.train.runs import first_layers, forget_newest, printed

#: Writes what a run of this length would, without a model. `meet` waits until another worker is there as well.
PRETEND = """
import json, os, pathlib, sys, time
folder = pathlib.Path(json.loads(sys.stdin.readline()))
order = json.loads((folder / "order.json").read_text())
kind = folder.parent.name
(folder / "pid").write_text(str(os.getpid()))
if kind == "hang":
    sys.stdin.read()
    sys.exit(3)
if kind == "die":
    print("about to die", file=sys.stderr, flush=True)
    sys.exit(7)
if kind == "kill":
    os.kill(os.getpid(), 9)
if kind.startswith("meet"):
    while len(list(folder.parents[1].glob("meet*/seed-0/pid"))) < 2:
        time.sleep(0.01)
with (folder / "metrics.jsonl").open("a") as file:
    file.write(json.dumps({"rollout": 1, "reward/mean": 0.5, "tokens/entropy": 0.25, "seconds/rollout": 0.1}) + "\\n")
record = json.loads((folder / "bench.json").read_text())
status, error = ("failed", "ValueError: bad luck") if kind == "fail" else ("finished", None)
before = order["spent"]["cpu_seconds"]
record |= {"status": status, "error": error, "seconds": 2.0, "cpu_seconds": None if before is None else before + 1.0}
(folder / "bench.json").write_text(json.dumps(record))
(folder / "resumed").write_text(str(order["resume"]))
(folder / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
"""


def tiny(out: Path, methods: Any, **more: Any) -> dict[str, Any]:
    """A bench of runs of two rollouts of 16 responses."""
    base = {
        "model": {"name": str(first_layers(1))},
        "rollout": {"prompts": 4, "group": 4, "max_new_tokens": 8},
        "optimisation": {"rollouts": 2, "lr": 1e-3},
        "evaluation": {"every": 0},
    }
    return {"name": "tiny", "out": str(out), "base": base, "methods": methods, "seeds": 1, "workers": 2, **more}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers pretend; a method called ``fail``, ``die``, ``kill``, ``hang`` or ``meet`` does so."""
    monkeypatch.setattr(running, "COMMAND", [sys.executable, "-c", PRETEND])
    monkeypatch.setattr(running, "POLL", 0.02)


def console(*, terminal: bool = False) -> Console:
    """One that keeps what is printed."""
    return Console(file=io.StringIO(), force_terminal=terminal, width=200)


def record(out: Path, name: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((out / "runs" / name / "bench.json").read_text())
    return kept


def serve(orders: Connection, answers: Connection, log: str, env: dict[str, str]) -> None:
    """A worker in a fork, which has imported what takes seconds to import."""
    print_to(Path(log))
    os.dup2(orders.fileno(), 0)
    os.dup2(answers.fileno(), 1)
    orders.close()
    answers.close()
    sys.stdin = open(0, closefd=False)  # multiprocessing opened another one
    os.environ.update(env)
    worker.main()


class Forked:
    """In place of ``subprocess.Popen`` for workers; what it started, in ``started``."""

    def __init__(self, started: list[Any], command: list[str], *, stderr: Any, env: dict[str, str], **_: Any) -> None:
        started.append(command)
        (orders, mine), (theirs, answers) = Pipe(duplex=False), Pipe(duplex=False)
        self._process = forkserver().Process(target=serve, args=(orders, answers, stderr.name, env))
        self._process.start()
        self.stdin, self.stdout = (
            os.fdopen(os.dup(end.fileno()), mode, 0) for end, mode in ((mine, "wb"), (theirs, "rb"))
        )
        for end in (orders, mine, theirs, answers):
            end.close()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self, seconds: float | None = None) -> int | None:
        self._process.join(seconds)
        return self.poll()


def test_a_worker_finishes_or_fails_its_runs_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    forked = SimpleNamespace(Popen=partial(Forked, started), TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(running, "subprocess", forked)
    settings = {"bad": {"task": {"name": "jsonl", "path": "no.jsonl"}}, "good": {}}
    bench = load_bench(tiny(tmp_path, {"grpo": ["clip_higher", {"name": "s2t", "quantile": 0.0}]}, settings=settings))
    where = console()
    assert run_bench(bench, workers=1, console=where) == 1
    assert started == [running.COMMAND]  # one process, whose imports are done once
    monkeypatch.undo()
    good, bad = record(tmp_path, "good/grpo/seed-0"), record(tmp_path, "bad/grpo/seed-0")
    assert (good["status"], good["error"], good["run_hash"]) == ("finished", None, bench.runs[1].hash)
    assert min(good["cpu_seconds"], good["seconds"]) > 0
    folder = bench.runs[1].folder
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((folder / "run.json").read_text())["threads"] == 1
    assert not (folder / "checkpoints").exists()
    assert bad["status"] == "failed"
    assert bad["error"].startswith("DataError: no.jsonl")
    assert "Traceback" in (bench.runs[0].folder / "worker.log").read_text()
    assert "failed bad/grpo/seed-0: DataError: no.jsonl" in printed(where)
    last = [f"folder: {tmp_path} (1 of 2 runs finished, 1 failed)", f"next: rlstab report {tmp_path}"]
    assert printed(where).splitlines()[-2:] == last
    about = json.loads((tmp_path / "bench.json").read_text())
    assert (about["name"], about["baseline"], "cpu" in about) == ("tiny", "grpo", True)
    assert [run.hash for run in load_bench(tmp_path / "bench.yaml").runs] == [run.hash for run in bench.runs]
    # a report on them reads there what shows that s2t never acted, and does not import torch
    for name in [name for name in sys.modules if re.match(r"(rlstab|torch)(\.|$)", name)]:
        monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module("rlstab.cli").main(["report", str(tmp_path)]) == 0
    assert "torch" not in sys.modules
    monkeypatch.undo()
    assert "its quantile is 0" in (tmp_path / "report" / "report.md").read_text()


@pytest.mark.usefixtures("pretend")
def test_runs_are_made_in_order_and_finished_ones_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = {**tiny(tmp_path, {"a": "clip_higher", "b": "s2t"}, seeds=2), "about": "Two."}
    bench = load_bench(file)
    where = console()
    assert run_bench(bench, workers=1, console=where) == 0
    names = [f"default/{method}/seed-{seed}" for seed in (0, 1) for method in "ab"]
    lines = printed(where).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("start")] == names
    first, _, left = lines[1].rpartition(", ")
    assert first == "[1/4] default/a/seed-0  reward 0.500, 1 CPU-seconds"
    assert re.fullmatch(r"about 0:\d\d:\d\d left", left)
    about = json.loads((tmp_path / "bench.json").read_text())
    assert about["about"] == load_bench(tmp_path / "bench.yaml").file.about == "Two."
    monkeypatch.setattr(running, "COMMAND", ["never started"])
    where = console()
    assert run_bench(bench, console=where) == 0
    last = [f"folder: {tmp_path} (4 of 4 runs finished)", f"next: rlstab report {tmp_path}"]
    assert printed(where).splitlines() == last
    fewer = load_bench({**file, "methods": {"a": "clip_higher"}})
    for see in (dry_run, run_bench):
        where = console()
        see(fewer, console=where)
        assert "does not name: default/b/seed-0, default/b/seed-1. A report" in printed(where)


@pytest.mark.usefixtures("pretend")
def test_workers_share_the_gpus_that_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of GPUs is faked, because there may be none; a worker sees what its process was told."""
    cases: list[tuple[str | None, int, list[str]]] = [
        (None, 2, ["0", "1"]),
        ("3,5", 2, ["3", "5"]),
        (None, 0, ["all"]),
        ("7, -1,2", 1, ["7"]),
    ]
    for number, (visible, count, names) in enumerate(cases):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        bench = load_bench(tiny(tmp_path / str(number), {"meet_1": "clip_higher", "meet_2": "s2t"}))
        assert run_bench(bench, console=console()) == 0
        assert sorted({(run.folder / "gpu").read_text() for run in bench.runs}) == names


@pytest.mark.usefixtures("pretend")
def test_changed_runs_need_a_word(tmp_path: Path) -> None:
    file = tiny(tmp_path, {"a": "clip_higher", "b": "s2t"})
    run_bench(load_bench(file), console=console())
    changed = load_bench({**file, "methods": {"a": "clip_higher", "b": {"name": "s2t", "max_prob": 0.5}}})
    with pytest.raises(ConfigError, match=r"1 run with other settings .*: default/b/seed-0\. .*--overwrite"):
        run_bench(changed, console=console())
    assert record(tmp_path, "default/b/seed-0")["run_hash"] == load_bench(file).runs[1].hash
    where = console()
    assert run_bench(changed, overwrite=True, console=where) == 0
    assert "default/a/seed-0" not in printed(where)
    assert record(tmp_path, "default/b/seed-0")["run_hash"] == changed.runs[1].hash


@pytest.mark.usefixtures("pretend")
def test_folders_that_are_taken_are_left_alone(tmp_path: Path) -> None:
    run_bench(load_bench(tiny(tmp_path, {"a": "clip_higher"})), console=console())
    before = (tmp_path / "bench.yaml").read_text()
    with pytest.raises(ConfigError, match="holds the bench 'tiny', and this is 'other'"):
        run_bench(load_bench({**tiny(tmp_path, {"b": "s2t"}), "name": "other"}), console=console())
    assert (tmp_path / "bench.yaml").read_text() == before


def test_two_processes_do_not_run_one_bench(tmp_path: Path) -> None:
    bench = load_bench(tiny(tmp_path, {"a": "clip_higher"}))
    with filelock.FileLock(tmp_path / ".lock"), pytest.raises(ConfigError, match="by another process"):
        run_bench(bench, console=console())


@pytest.mark.usefixtures("pretend")
def test_failures_are_kept_until_a_retry(tmp_path: Path) -> None:
    bench = load_bench(tiny(tmp_path, {"fail": "clip_higher", "die": "s2t", "kill": "kl", "good": "stare"}))
    assert run_bench(bench, console=console()) == 1
    assert record(tmp_path, "default/fail/seed-0")["error"] == "ValueError: bad luck"
    died = record(tmp_path, "default/die/seed-0")
    assert (died["status"], died["error"]) == ("failed", "about to die\nthe worker ended with code 7")
    assert died["cpu_seconds"] is None
    assert record(tmp_path, "default/kill/seed-0")["error"] == "the worker was ended by SIGKILL"
    assert record(tmp_path, "default/good/seed-0")["status"] == "finished"
    where = console()
    assert run_bench(bench, console=where) == 1
    assert "start" not in printed(where)
    assert f"{tmp_path / 'bench.yaml'} --retry" in printed(where)
    assert run_bench(bench, retry=True, only=["default/fail"], console=where) == 1
    assert [line for line in printed(where).splitlines() if "start" in line] == ["start  default/fail/seed-0"]


def until(there: Path) -> int:
    """The number in a file that a worker is about to write."""
    while not (there.exists() and there.read_text()):
        time.sleep(0.01)
    return int(there.read_text())


@pytest.mark.usefixtures("pretend")
def test_ctrl_c_stops_the_workers_and_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.yaml").write_text(dump(tiny(tmp_path / "out", {"hang": "clip_higher"}, seeds=3)))
    bench = load_bench(tmp_path / "b.yaml")
    pids: list[int] = []

    def interrupt(screen: Screen, runs: Any) -> None:
        pids.extend(until(run.folder / "pid") for run in bench.runs[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "look", interrupt)
    where = console()
    assert run_bench(bench, console=where) == 130
    again = f"stopped; 0 of 3 runs finished. Continue with: rlstab bench {tmp_path / 'b.yaml'}"
    assert printed(where).splitlines()[-1] == again
    assert len(set(pids)) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert record(bench.out, "default/hang/seed-0")["status"] == "running"
    assert not bench.runs[2].folder.exists()


@pytest.mark.usefixtures("pretend")
def test_a_run_that_was_cut_off_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    bench = load_bench(tiny(tmp_path, {"a": "clip_higher", "b": "s2t", "c": "stare", "d": "kl"}))
    run_bench(bench, console=console())
    for run, seconds in zip(bench.runs, (10.0, 10.0, None, 0.0), strict=True):
        values = {**record(tmp_path, run.name), "status": "running", "cpu_seconds": seconds}
        (run.folder / "bench.json").write_text(json.dumps(values))
        if run.method != "b":
            with_checkpoint(run.folder, whole=run.method != "d")
    assert [run.method for run in plan_of(bench.runs)["resumed"]] == ["a", "c"]
    where = console()
    assert run_bench(bench, console=where) == 0
    lines = sorted(line for line in printed(where).splitlines() if line.startswith(("resume", "start")))
    assert lines == [f"resume default/{name}/seed-0" for name in "ac"] + [
        f"start  default/{name}/seed-0" for name in "bd"
    ]
    resumed = {run.method: (run.folder / "resumed").read_text() for run in bench.runs}
    assert resumed == {"a": "True", "b": "False", "c": "True", "d": "False"}
    spent = {run.method: record(tmp_path, run.name)["cpu_seconds"] for run in bench.runs}
    assert spent == {"a": 11.0, "b": 1.0, "c": None, "d": 1.0}


def with_checkpoint(folder: Path, *, whole: bool = True) -> None:
    """Write what a checkpoint of the first rollout looks like."""
    inside = folder / "checkpoints" / "rollout-000001"
    inside.mkdir(parents=True)
    index = {"rollout": 1, "run": {"run_id": "a"}, "files": {} if whole else {"lost": ""}}
    (inside / "trainer.json").write_text(json.dumps({**index, "sha256": checkpoint._sum(index)}))


def begun(bench: Any, status: str | None, *, record: bool = True, whole: bool | None = True) -> None:
    """The only run of a bench as a kill may leave it, with its settings, records of one rollout and a checkpoint."""
    (run,) = bench.runs
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(dump_run(run.config))
    (run.folder / "metrics.jsonl").write_text('{"rollout": 1}\n')
    if record:
        (run.folder / "bench.json").write_text(json.dumps({"status": status, "run_hash": run.hash}))
    if whole is not None:
        with_checkpoint(run.folder, whole=whole)


#: What a bench finds (status, whether its record, a checkpoint, a whole one is there), whether the learning rate was
#: edited since, the options, and what it does with the run.
FOUND = [
    ("running", True, True, False, {}, "resumed"),
    ("failed", True, True, False, {}, "failed"),
    ("failed", True, True, False, {"retry": True}, "resumed"),
    ("failed", True, False, False, {"retry": True}, "anew"),
    ("failed", True, None, False, {"retry": True}, "anew"),
    ("running", True, None, False, {}, "anew"),
    (None, False, True, False, {}, "resumed"),
    ("running", True, True, True, {}, "changed"),
    ("running", True, None, True, {}, "changed"),
    ("failed", True, True, True, {}, "changed"),
    ("failed", True, True, True, {"retry": True}, "changed"),
    ("failed", True, None, True, {"retry": True}, "anew"),
    ("running", True, True, True, {"overwrite": True}, "anew"),
    (None, False, True, True, {}, "changed"),
    ("finished", True, None, True, {"retry": True}, "changed"),
    ("finished", True, None, False, {"overwrite": True}, "finished"),
]


def test_no_work_is_lost_whatever_a_run_was_left_as(tmp_path: Path) -> None:
    for number, (status, kept, whole, edited, options, what) in enumerate(FOUND):
        file = tiny(tmp_path / str(number), {"a": "clip_higher"})
        begun(load_bench(file), status, record=kept, whole=whole)
        file["settings"] = {"default": {"optimisation.lr": 0.5}} if edited else {}
        bench = load_bench(file)
        found = plan_of(bench.runs, **options)
        assert [kind for kind, runs in found.items() if runs] == [what], FOUND[number]
        where = console()
        dry_run(bench, console=where)
        assert ("optimisation.lr = 0.001, now 0.5" in printed(where)) is edited, FOUND[number]


def test_a_reward_with_other_arguments_ends_the_bench_before_its_first_run(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def short(completion):\n    return 1.0\n")
    file = tiny(tmp_path / "out", {"a": "clip_higher"})
    file["base"]["reward"] = f"{tmp_path / 'rewards.py'}:short"
    with pytest.raises(ScorerError, match=r"must take \(prompt, completion, answer\)"):
        run_bench(load_bench(file), console=console())
    assert not (tmp_path / "out" / "runs").exists()


def test_what_the_file_changed_elsewhere_is_told_with_only(tmp_path: Path) -> None:
    file = tiny(tmp_path, {"a": "clip_higher", "b": "s2t"})
    first = load_bench(file)
    for run in first.runs[:1]:
        begun(replace(first, runs=(run,)), "finished", whole=None)
    file["base"]["optimisation"]["lr"] = 0.5
    with pytest.raises(ConfigError, match=r"1 run with other settings .*: default/a/seed-0 \(optimisation.lr = 0.001"):
        run_bench(load_bench(file), only=["*/b"], console=console())


def test_a_run_of_an_earlier_release_is_known_by_its_settings(tmp_path: Path) -> None:
    """And settings that change no result are not looked at; those of an evaluation are told."""
    file = tiny(tmp_path, {"a": "clip_higher"})
    begun(bench := load_bench(file), "finished", whole=None)
    (bench.runs[0].folder / "bench.json").write_text('{"status": "finished", "run_hash": "of another kind"}')
    neutral = {"optimisation.micro_batch_size": 3, "rollout.batch_size": 7, "evaluation.every": 5}
    for values, kind in ((neutral, "finished"), ({"evaluation.prompts": 3}, "measured")):
        plan = plan_of(load_bench({**file, "settings": {"default": values}}).runs)
        assert [name for name, runs in plan.items() if runs] == [kind]


#: A worker whose runs end as their settings say, without a model.
TRAIN = """
import os, sys, time, types
sys.modules["rlstab.train.loop"] = types.ModuleType("loop")
import rlstab.bench.worker as worker
def train(run, resume):
    print("trained")
    {"die": lambda: os.kill(os.getpid(), 9), "sleep": lambda: time.sleep(30), "end": lambda: None}[run["how"]]()
worker._train = train
worker.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_killed_run_takes_no_other_with_it_and_a_worker_leaves_with_its_parent(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen([sys.executable, "-c", TRAIN], **pipes) as worker:
        for how, code in (("die", -signal.SIGKILL), ("end", 0), ("sleep", ORPHANED)):
            folder = tmp_path / how
            folder.mkdir()
            (folder / "bench.json").write_text('{"status": "running"}')
            run = {"how": how, "tracking": {"out": str(folder)}}
            spent = {"seconds": 5.0, "cpu_seconds": 3.0}
            order = {"run": run, "resume": True, "keep_checkpoints": False, "spent": spent}
            (folder / "order.json").write_text(json.dumps(order))
            worker.stdin.write(json.dumps(str(folder)).encode() + b"\n")
            if how == "sleep":
                worker.stdin.close()
            assert worker.stdout.readline() == f"{code}\n".encode()
        assert worker.wait() == 0
    left = [json.loads((tmp_path / how / "bench.json").read_text()) for how in ("die", "end", "sleep")]
    assert [record["status"] for record in left] == ["running", "finished", "running"]
    assert left[2]["seconds"] >= 5.0
    assert 3.0 < left[2]["cpu_seconds"] < 60
    assert (tmp_path / "end" / "worker.log").read_text() == "trained\n"


def test_only_takes_patterns_and_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    names = ["a", f"a-name-that-is-as-long-as-a-folder-may-well-be-{'x' * 40}-Y"]
    methods = dict(zip(names, ["clip_higher", "cispo"], strict=True))  # equal ones are told by their names
    bench = load_bench(tiny(tmp_path / "b", methods, seeds=2))
    where = Console(file=io.StringIO(), force_terminal=False, width=40)
    dry_run(bench, only=["*/a-*", "default/a/seed-1"], console=where)
    assert [line for line in printed(where).splitlines() if "responses" in line] == [
        "default/a: 1 runs, 0 finished, 2 rollouts, 2 optimizer steps, 32 responses",
        f"default/{names[1]}: 2 runs, 0 finished, 4 rollouts, 4 optimizer steps, 64 responses",
        "all: 3 runs, 0 finished, 6 rollouts, 6 optimizer steps, 96 responses",
    ]
    assert not (tmp_path / "b").exists()
    with pytest.raises(ConfigError, match=r"--only default/c: .*Methods: a, a-name"):
        dry_run(bench, only=["default/c"])


@pytest.mark.usefixtures("pretend")
def test_the_command_makes_one_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b.yaml").write_text(dump(tiny(Path("out"), {"a": "clip_higher", "b": "s2t"}, seeds=2)))
    assert main(["bench", "b.yaml"]) == 0
    command = record(Path("out"), "default/b/seed-1")["command"]
    assert command == "rlstab bench b.yaml --only default/b/seed-1 --out runs/tiny-again"
    assert main(command.split()[1:]) == 0
    assert [path.parent.name for path in Path("runs/tiny-again").rglob("metrics.jsonl")] == ["seed-1"]
    again = record(Path("runs/tiny-again"), "default/b/seed-1")
    assert again["run_hash"] == record(Path("out"), "default/b/seed-1")["run_hash"]


def test_the_time_left_of_a_bench_counts_the_runs_that_are_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = load_bench(tiny(tmp_path, {"a": "clip_higher", "b": "s2t"}, seeds=2)).runs
    where, clock = console(), iter([0.0, 100.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    screen = progress.Screen(where, runs, runs)
    for run in runs[:2]:
        run.folder.mkdir(parents=True)
        (run.folder / "metrics.jsonl").write_text('{"rollout": 2}')
        (run.folder / "bench.json").write_text('{"status": "finished"}')
    screen.look(runs[:2])  # of four runs, one has ended and one is about to
    screen.ended(runs[0])
    assert "about 0:01:40 left" in printed(where)


@pytest.mark.usefixtures("pretend")
def test_a_terminal_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench(tiny(tmp_path, {"a": "kl", "fail": "s2t"}))
    where = console(terminal=True)
    assert run_bench(bench, console=where) == 1
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed(where))
    assert "2/2" in shown
    assert "failed default/fail/seed-0" in shown
    assert "ValueError: bad luck" in shown
    (tmp_path / "metrics.jsonl").write_text('{"rollout": 1}\n[]\n{"rollout": 2, "reward/mean": 0.5}\n{"rol')
    assert [line["rollout"] for line in last_records(tmp_path)] == [1, 2]
    monkeypatch.setattr("rlstab.bench.record.TAIL", 45)
    assert [line["rollout"] for line in last_records(tmp_path)] == [2]


@pytest.mark.slow
def test_a_real_worker_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    file = tiny(tmp_path, {"a": "clip_higher"}, keep_checkpoints=True)
    file["base"]["tracking"] = {"checkpoint_every": 1}
    (run,) = (bench := load_bench(file)).runs
    assert run_bench(bench, console=console()) == 0
    first, _ = (run.folder / "metrics.jsonl").read_text().splitlines()
    forget_newest(run.folder)
    (run.folder / "bench.json").write_text(json.dumps({**record(tmp_path, run.name), "status": "running"}))
    assert run_bench(bench, console=console()) == 0
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert (lines[0], len(lines)) == (first, 2)  # its seconds too: it was not trained again
    assert (run.folder / "checkpoints" / "rollout-000002").exists()
