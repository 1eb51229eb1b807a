"""Launchers: as many processes as were launched, one line where they are not what was asked for, an end for all."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlstab.config import dump_run, load_run
from rlstab.errors import ConfigError
from tests.train.forks import HANGS, Forks, free_port
from tests.train.runs import (
    ALIKE,
    ROOT,
    SMOOTH,
    about,
    apart,
    checkpoints,
    differences,
    file_of,
    go,
    left,
    lines,
    long,
    metrics,
    number,
    of_user,
    small,
)

PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]

#: Every line of the documents that starts several processes of the command line.
PRINTED = sorted(
    {line for page in PAGES for line in re.findall(r"^.*-m rlstab(?:\.cli)? train FILE$", page.read_text(), re.M)}
)


def command(file: Path, processes: int = 2, line: str = "torchrun") -> list[str]:
    """A printed line, for one of our files, with another number of processes."""
    printed = next(text for text in PRINTED if text.startswith(line))
    printed = re.sub(r"(--nproc_per_node|--num_processes) 2\b", rf"\1 {processes}", printed)
    return [str(file) if word == "FILE" else word for word in shlex.split(printed)]


def start(arguments: list[str], **more: str) -> subprocess.Popen[str]:
    """With the programs of this Python first in the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **more}
    return subprocess.Popen(arguments, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


@contextmanager
def cleared(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Nothing is left running whatever a test finds."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def said_by(processes: list[subprocess.Popen[str]], code: int) -> list[str]:
    """What processes say that all end with this code."""
    with cleared(processes):
        said = [process.communicate(timeout=HANGS)[1] for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), said
    return said


def ran(arguments: list[str], **more: str) -> str:
    """What a command that ends well says."""
    return said_by([start(arguments, **more)], 0)[0]


def engine_of(out: Path) -> tuple[int, str]:
    """The processes of a run, as they counted themselves, and its engine."""
    return about(out)["processes"], about(out)["engine"].split(",")[0]


def by_hand(*files: Path, more: tuple[str, ...] = ()) -> list[subprocess.Popen[str]]:
    """Two processes without a launcher, each with its file, rank 0 first."""
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    train = [sys.executable, "-m", "rlstab", "train"]
    ranks = enumerate(files)
    return [start([*train, str(file), *more], RANK=str(rank), LOCAL_RANK=str(rank), **met) for rank, file in ranks]


def wait_for_records(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + HANGS
    while len(lines(out / "metrics.jsonl")) < count:
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_torchrun_as_printed_starts_two_that_train_to_the_weights_of_one(tmp_path: Path) -> None:
    assert {line.split()[0] for line in PRINTED} == {"torchrun", "accelerate"}
    go(small(tmp_path / "one", **SMOOTH))
    ran(command(file_of(small(tmp_path / "two", **SMOOTH))))
    assert engine_of(tmp_path / "two") == (2, "ddp")
    assert apart(tmp_path / "one", tmp_path / "two") <= ALIKE


@pytest.mark.slow
def test_accelerate_launch_as_printed_starts_two_and_shards_where_it_is_asked_to(tmp_path: Path) -> None:
    go(small(tmp_path / "one", **SMOOTH))
    for name, more in {"ddp": [], "fsdp2": ["--use_fsdp", "--fsdp_version", "2"]}.items():
        line = command(file_of(small(tmp_path / name, **SMOOTH)), line="accelerate")
        ran([*line[:2], *more, *line[2 if not more else 3 :]])
        assert engine_of(tmp_path / name) == (2, name)
        assert apart(tmp_path / "one", tmp_path / name) <= ALIKE
    line = command(file_of(small(tmp_path / "cpu")), line="accelerate")
    assert "accelerate launch" in ran([word.replace("--multi_gpu", "--cpu") for word in line])
    assert about(tmp_path / "cpu")["processes"] == 1, "it was asked for two, started one, and says so"


def test_what_a_launcher_asks_for_and_does_not_get_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that never came too: an earlier run of this process has met alone."""
    go(small(tmp_path / "before"))
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    refused: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({"WORLD_SIZE": "2"}, {}),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {}),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, {}),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {}),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, {}),
        ({"FSDP_VERSION": "2", "ACCELERATE_USE_FSDP": "true"}, {"engine": "ddp"}),
        ({**fsdp, "FSDP_OFFLOAD_PARAMS": "true"}, {}),
        ({**fsdp, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}),
    ]
    for launcher, changes in refused:
        with monkeypatch.context() as patched:
            for name, value in launcher.items():
                patched.setenv(name, value)
            with pytest.raises(ConfigError, match=[*launcher][-1]):
                go(small(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_that_make_different_runs_are_refused(tmp_path: Path) -> None:
    for changes in ({"seed": 1}, {"engine": "fsdp2"}):
        ranks = by_hand(file_of(small(tmp_path / "first")), file_of(small(tmp_path / "second", **changes)))
        said = said_by(ranks, 2)
        assert all(text.startswith("ConfigError: rank 1 ") for text in said), said
        assert not [*tmp_path.glob("*/config.yaml")]


EXAMPLES = ROOT / "docs" / "examples"

#: In place of SLURM: two nodes that are this machine.
SRUN = """#!/bin/bash
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait -n && wait -n
"""


@pytest.mark.slow
def test_the_example_of_several_machines_starts_as_many_as_it_says(tmp_path: Path) -> None:
    file = file_of(small(tmp_path / "run", engine="fsdp2"))
    more = {"HOST": "localhost", "NODES": "2", "PROCESSES": "1", "PORT": str(free_port())}
    said_by([start(["bash", str(EXAMPLES / "torchrun.sh"), str(file)], **more) for _ in range(2)], 0)
    assert about(tmp_path / "run")["processes"] == 2


@pytest.mark.slow
def test_the_example_of_slurm_starts_one_process_on_each_node_and_continues(tmp_path: Path) -> None:
    file = file_of(small(tmp_path / "run", tracking__checkpoint_every=1))
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    more = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "PATH": path}
    for rollouts in (2, 3):  # the second time it is requeued
        file.write_text(dump_run(load_run(file, {"optimisation.rollouts": rollouts})))
        ran(["bash", str(EXAMPLES / "slurm.sh"), str(file)], **more, PORT=str(free_port()))
        assert about(tmp_path / "run")["processes"] == 2
        assert [record["rollout"] for record in metrics(tmp_path / "run")] == list(range(1, rollouts + 1))


def test_when_one_rank_raises_all_end_and_say_which(forks: Forks, tmp_path: Path) -> None:
    objective = ["clip_higher", of_user("WeighPlaces", signal="places")]
    file = file_of(small(tmp_path / "run", objective, tracking__checkpoint_every=1))
    done = forks.tries(file, 2, "provided", breaks=2)
    assert done.codes == [1, 1]
    assert "ValueError: no signal here" in done.said[1]
    assert "rank 1" in done.said[1]
    assert [record["rollout"] for record in metrics(tmp_path / "run")] == [1]


LONG: dict[str, Any] = {"task": of_user("Slow"), "optimisation__rollouts": 8}


@pytest.fixture(scope="module")
def uninterrupted(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("whole") / "run"
    forks.does(file_of(long(out, **LONG)), 2)
    return left(out)


@pytest.mark.slow
def test_a_killed_rank_ends_all(forks: Forks, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    """Under torchrun, which says which; and without a launcher, where the connection closes."""
    for launcher in ("torchrun", "none"):
        out = tmp_path / launcher
        file = file_of(long(out, **LONG))
        ranks = [start(command(file))] if launcher == "torchrun" else by_hand(file, file)
        with cleared(ranks):
            wait_for_records(out, 3, ranks[0])
            children = psutil.Process(ranks[0].pid).children()
            victims = [child for child in children if child.environ().get("RANK") == "1"] or ranks[1:]
            victims[0].send_signal(signal.SIGKILL)
            said = ranks[0].communicate(timeout=HANGS)[1]
        assert ranks[0].returncode != 0
        assert launcher == "none" or re.search(r"rank +: 1 .*\n +exitcode +: -9 ", said), said
        forks.does(file, 2, resume=True)
        assert about(out)["processes"] == 2
        assert differences(out, uninterrupted) == []


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all(forks: Forks, uninterrupted: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    file = file_of(long(out, **LONG))
    ranks = by_hand(file, file)
    with cleared(ranks):
        wait_for_records(out, 4, ranks[1])
        ranks[1].send_signal(signal.SIGTERM)
        said = said_by(ranks, 128 + signal.SIGTERM)
    newest = checkpoints(out)[-1]
    assert lines(out / "metrics.jsonl")[-1]["rollout"] == number(newest)
    assert str(newest) in said[0]
    # what the first finds in the folder, all of them say
    assert all(text.startswith("ConfigError: ") for text in said_by(by_hand(file, file), 2))
    forks.does(file, 2, resume=True)
    last = [name for name in differences(out, uninterrupted) if name.startswith(("8/", "metrics", "samples", "tokens"))]
    assert last == []


@pytest.mark.slow
def test_a_rank_that_is_silent_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    file = file_of(long(tmp_path / "run", **LONG))
    ranks = by_hand(file, file, more=("--timeout", "5"))
    with cleared(ranks):
        wait_for_records(tmp_path / "run", 3, ranks[1])
        ranks[1].send_signal(signal.SIGSTOP)
        said = ranks[0].communicate(timeout=HANGS)[1]
        assert ranks[1].poll() is None, "it was silent, not gone"
    assert ranks[0].returncode == 1
    assert "5000ms" in said
