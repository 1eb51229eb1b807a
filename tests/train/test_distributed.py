"""Several processes: as many as were launched, the weights of one, and an end for all when one of them fails."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlstab.config import RunConfig, dump_run, load_run
from rlstab.errors import ConfigError
from rlstab.train import train
from rlstab.train.checkpoint import checkpoints, number
from rlstab.train.processes import count, launched_alone, meet
from tests.train.ranks import fading, places, weighing
from tests.train.runs import go, quiet, small, trained_alike, weights, without_times

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
#: Every line of the documents that starts several processes of the command line.
PRINTED = sorted(
    {line for page in PAGES for line in re.findall(r"^.*-m rlstab\.cli train FILE$", page.read_text(), re.M)}
)
STACK = [{"preset": "recommended"}, {"name": "lp_reg", "share": 0.2}, "entropy_bonus"]
#: Nothing here takes a tenth of it; what takes longer hangs.
HANGS = 240


def command(file: Path, processes: int = 2, line: str = "torchrun", scenario: str | None = None) -> list[str]:
    """A printed line, for a file of ours, with another number of processes, or for a scenario of ``ranks.py``."""
    (printed,) = [one for one in PRINTED if one.startswith(line)]
    printed = re.sub(r"(--nproc_per_node|--num_processes) 2\b", rf"\1 {processes}", printed)
    if scenario is not None:
        printed = printed.replace("rlstab.cli train", f"tests.train.ranks {scenario}")
    return [str(file) if one == "FILE" else one for one in shlex.split(printed)]


def environment(**more: str) -> dict[str, str]:
    """Ours, with the programs of this Python first in the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads()), **more}


def start(arguments: list[str], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(arguments, cwd=ROOT, env=environment(**more), stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> str:
    """What it wrote to standard error, once it has ended, without torch's marks of the rank."""
    _, said = process.communicate(timeout=HANGS)
    return re.sub(r"^\[rank\d\]: ", "", said, flags=re.MULTILINE)


def ran(arguments: list[str]) -> str:
    """What it wrote to standard error; it must end well."""
    with start(arguments) as process:
        said = end(process)
    assert process.returncode == 0, said
    return said


def file_of(run: RunConfig, folder: Path) -> Path:
    file = folder / f"{Path(run.tracking.out).name}.yaml"
    file.write_text(dump_run(run))
    return file


def counted(out: Path) -> int:
    """The processes of a run, as it counted them itself."""
    return int(json.loads((out / "run.json").read_text())["processes"])


ONE_STEP = {"rollout__prompts": 6, "evaluation__every": 3, "evaluation__prompts": 5}
#: Three mini-batches of one prompt: in each optimizer step one rank is empty.
EMPTY = {"rollout__prompts": 3, "optimisation__mini_batches": 3, "optimisation__epochs": 2, **{"evaluation__every": 3}}


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        pytest.param(2, {**EMPTY, "evaluation__prompts": 5}, id="a rank empty in each step"),
        pytest.param(1, ONE_STEP, marks=pytest.mark.slow, id="one"),
        pytest.param(3, ONE_STEP, marks=pytest.mark.slow, id="three"),
        pytest.param(
            3,
            {"rollout__prompts": 2, "evaluation__every": 3, "evaluation__prompts": 2},
            marks=pytest.mark.slow,
            id="a rank without any response",
        ),
    ],
)
def test_processes_train_to_the_same_weights_as_one(processes: int, changes: dict[str, Any], tmp_path: Path) -> None:
    settings = {"optimisation__lr": 1e-4, **changes}
    go(small(tmp_path / "one", STACK, **settings))
    ran(command(file_of(small(tmp_path / "several", STACK, **settings), tmp_path), processes))
    assert (counted(tmp_path / "one"), counted(tmp_path / "several")) == (1, processes)
    assert [one["rollout"] for one in without_times(tmp_path / "several") if "eval/pass@4" in one] == [0, 3]
    trained_alike(tmp_path / "one", tmp_path / "several")


def test_when_one_rank_raises_all_end_and_say_which(tmp_path: Path) -> None:
    file = file_of(small(tmp_path / "run", tracking__checkpoint_every=1), tmp_path)
    with start(command(file, scenario="raises")) as process:
        said = end(process)
    assert process.returncode != 0
    assert counted(tmp_path / "run") == 2
    assert "ValueError: no advantages here\n" in said
    assert "raised on rank 1 of 2 processes" in said
    assert "\nrank 1 of 2 ended with ValueError: no advantages here\nraised on rank 0 of 2 processes" in said
    assert [one["rollout"] for one in without_times(tmp_path / "run")] == [1]


# -- lines of the documents ------------------------------------------------------------------------------------------


def test_the_documents_print_lines_that_start_several_processes() -> None:
    assert {line.split()[0] for line in PRINTED} == {"torchrun", "accelerate"}
    others = [
        page
        for page in PAGES
        if re.search(r"accelerate launch (?!--multi_gpu|--use_fsdp|--cpu` starts one)", page.read_text())
    ]
    assert others == []


@pytest.mark.slow
def test_accelerate_launch_as_printed_starts_two(tmp_path: Path) -> None:
    said = ran(command(file_of(small(tmp_path / "run"), tmp_path), line="accelerate"))
    assert counted(tmp_path / "run") == 2
    assert "one process:" not in said


@pytest.mark.slow
def test_accelerate_launch_with_fsdp_shards(tmp_path: Path) -> None:
    """Accelerate itself ignores it on a CPU; transformers does not."""
    go(small(tmp_path / "one", optimisation__lr=1e-4))
    line = command(file_of(small(tmp_path / "run", optimisation__lr=1e-4), tmp_path), line="accelerate")
    ran([*line[:2], "--use_fsdp", "--fsdp_version", "2", *line[3:]])
    assert counted(tmp_path / "run") == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["engine"] == "fsdp2, 2 processes"
    trained_alike(tmp_path / "one", tmp_path / "run")


@pytest.mark.slow
def test_accelerate_launch_with_deepspeed_is_refused(tmp_path: Path) -> None:
    more = {"ACCELERATE_USE_DEEPSPEED": "true"}
    with start(command(file_of(small(tmp_path / "run"), tmp_path)), **more) as process:
        said = end(process)
    assert process.returncode != 0
    assert said.startswith("ConfigError: the launcher asks for DeepSpeed (ACCELERATE_USE_DEEPSPEED), which rlstab does")


@pytest.mark.slow
def test_a_launch_for_several_processes_that_starts_one_is_told_so(tmp_path: Path) -> None:
    line = [
        one.replace("--multi_gpu", "--cpu") for one in command(file_of(small(tmp_path / "run"), tmp_path), 2, "acc")
    ]
    said = ran(line)
    assert counted(tmp_path / "run") == 1
    assert "one process: accelerate launch was asked for several processes" in said


def test_whom_the_warning_is_for() -> None:
    launched = {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1"}
    assert launched_alone(1, launched) is not None
    assert launched_alone(2, launched) is None
    assert launched_alone(1, {"MASTER_ADDR": "127.0.0.1"}) is None, "a cluster's own"
    assert launched_alone(1, {"ACCELERATE_USE_CPU": "True"}) is None, "accelerate launch of one"


def test_missing_processes_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meet(tmp_path, [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"^2 processes were launched \(WORLD_SIZE\) and 1 answered\. Launch"):
        count("run")


EXAMPLES = ROOT / "docs" / "examples"

#: In place of SLURM: two nodes that are this machine.
SRUN = """#!/bin/bash
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait -n && wait -n
"""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.slow
def test_the_example_of_several_machines_starts_as_many_as_it_says(tmp_path: Path) -> None:
    file = file_of(small(tmp_path / "run", engine="fsdp2"), tmp_path)
    more = {"HOST": "localhost", "NODES": "2", "PROCESSES": "1", "PORT": free_port()}
    machines = [start(["bash", str(EXAMPLES / "torchrun.sh"), str(file)], **more) for _ in range(2)]
    with cleared(machines):
        said = [end(one) for one in machines]
        assert [one.returncode for one in machines] == [0, 0], said
    assert counted(tmp_path / "run") == 2


@pytest.mark.slow
def test_the_example_of_slurm_starts_one_process_on_each_node_and_continues(tmp_path: Path) -> None:
    file = file_of(small(tmp_path / "run", tracking__checkpoint_every=1), tmp_path)
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho localhost\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{environment()['PATH']}"
    more = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "PATH": path}
    for rollouts in (2, 3):  # the second time it is requeued
        run = load_run(file, {"optimisation.rollouts": rollouts})
        file.write_text(dump_run(run))
        with start(["bash", str(EXAMPLES / "slurm.sh"), str(file)], **more, PORT=free_port()) as process:
            said = end(process)
        assert process.returncode == 0, said
        assert counted(tmp_path / "run") == 2
        assert [one["rollout"] for one in without_times(tmp_path / "run")] == list(range(1, rollouts + 1))


# -- one that fails --------------------------------------------------------------------------------------------------

LONG = {
    "optimisation__rollouts": 12,
    "optimisation__mini_batches": 2,
    "tracking__checkpoint_every": 2,
    "evaluation__every": 4,
    "evaluation__prompts": 4,
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    ran(command(file_of(small(folder / "run", STACK, **LONG), folder)))
    return folder / "run"


def by_hand(files: list[Path], *more: str) -> list[subprocess.Popen[str]]:
    """Two processes without a launcher, each with its file, rank 0 first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    train = [sys.executable, "-m", "rlstab.cli", "train"]
    return [
        start([*train, str(file), *more], RANK=str(rank), LOCAL_RANK=str(rank), **meet)
        for rank, file in enumerate(files)
    ]


def wait_for_lines(out: Path, lines: int, alive: Callable[[], bool]) -> None:
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + HANGS
    while not metrics.exists() or metrics.read_text().count("\n") < lines:
        assert alive(), "it ended before the signal"
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def cleared(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Nothing is left running whatever a test finds."""
    try:
        yield
    finally:
        for one in processes:
            one.kill()
            one.communicate()


def assert_resumes(file: Path, out: Path, uninterrupted: Path) -> None:
    done = len(without_times(out))
    assert done < len(without_times(uninterrupted))
    ran([*command(file), "--resume"])
    assert counted(out) == counted(uninterrupted) == 2
    left, right = weights(out), weights(uninterrupted)
    assert all(torch.equal(left[name], right[name]) for name in left | right)
    assert without_times(out) == without_times(uninterrupted)


@pytest.mark.slow
def test_when_a_rank_is_killed_under_torchrun_all_end_and_the_run_resumes(tmp_path: Path, uninterrupted: Path) -> None:
    out = tmp_path / "run"
    file = file_of(small(out, STACK, **LONG), tmp_path)
    with start(command(file)) as process, cleared([process]):
        wait_for_lines(out, 4, lambda: process.poll() is None)
        (victim,) = [one for one in psutil.Process(process.pid).children() if one.environ().get("RANK") == "1"]
        victim.send_signal(signal.SIGKILL)
        said = end(process)
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9 ", said), said
    assert process.returncode != 0
    assert_resumes(file, out, uninterrupted)


@pytest.mark.slow
def test_when_a_rank_is_killed_without_a_launcher_the_other_ends(tmp_path: Path, uninterrupted: Path) -> None:
    out = tmp_path / "run"
    file = file_of(small(out, STACK, **LONG), tmp_path)
    ranks = by_hand([file, file])
    with cleared(ranks):
        wait_for_lines(out, 4, lambda: ranks[1].poll() is None)
        assert counted(out) == 2
        ranks[1].send_signal(signal.SIGKILL)
        assert ranks[1].wait(HANGS) == -signal.SIGKILL
        said = end(ranks[0])  # long before the timeout: the connection closes
    assert ranks[0].returncode == 1
    assert "raised on rank 0 of 2 processes\nif it is about a connection or a timeout, another process" in said
    assert_resumes(file, out, uninterrupted)


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(tmp_path: Path, uninterrupted: Path) -> None:
    out = tmp_path / "run"
    file = file_of(small(out, STACK, **LONG), tmp_path)
    ranks = by_hand([file, file])
    with cleared(ranks):
        wait_for_lines(out, 4, lambda: ranks[1].poll() is None)
        ranks[1].send_signal(signal.SIGTERM)
        said = [end(one) for one in ranks]
    assert [one.returncode for one in ranks] == [128 + signal.SIGTERM] * 2
    newest = checkpoints(out / "checkpoints")[-1]
    told = "".join(
        one for one in said[0].splitlines(keepends=True) if not one.startswith(("engine:", "rollout ", "health:"))
    )
    assert told.startswith(f"stopped by SIGTERM after rollout {number(newest)} of 12; the checkpoint is {newest}. ")
    assert "stopped" not in said[1]
    ranks = by_hand([file, file])  # what the first finds in the folder, all of them say
    with cleared(ranks):
        said = [end(one) for one in ranks]
    assert [one.returncode for one in ranks] == [2, 2]
    assert all(text.startswith(f"ConfigError: {out} already holds a run. ") for text in said)
    assert_resumes(file, out, uninterrupted)


@pytest.mark.slow
def test_a_rank_that_is_silent_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    file = file_of(small(tmp_path / "run", STACK, **LONG), tmp_path)
    ranks = by_hand([file, file], "--timeout", "5")
    with cleared(ranks):
        wait_for_lines(tmp_path / "run", 4, lambda: ranks[1].poll() is None)
        ranks[1].send_signal(signal.SIGSTOP)
        said = end(ranks[0])
        assert ranks[1].poll() is None, "it was silent, not gone"
    assert ranks[0].returncode == 1
    assert "raised on rank 0 of 2 processes" in said
    assert "5000ms" in said


@pytest.mark.slow
def test_a_rank_that_dies_before_they_meet_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    """Unless a launcher notices."""
    file = file_of(small(tmp_path / "run"), tmp_path)
    ranks = by_hand([file, file], "--timeout", "5")
    with cleared(ranks):
        ranks[1].send_signal(signal.SIGKILL)
        said = end(ranks[0])
    assert ranks[0].returncode == 1
    assert re.search("clients joined|timed? ?out", said, re.IGNORECASE), said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_torchrun_notices_a_rank_that_dies_before_they_meet(tmp_path: Path) -> None:
    """The other would wait for half an hour."""
    with start(command(file_of(small(tmp_path / "run"), tmp_path), scenario="early")) as process, cleared([process]):
        said = end(process)
    assert process.returncode != 0
    assert re.search(r"rank +: 1 .*\n +exitcode +: 3 ", said), said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_that_make_different_runs_are_refused(tmp_path: Path) -> None:
    files = [file_of(small(tmp_path / str(seed), seed=seed), tmp_path) for seed in range(2)]
    ranks = by_hand(files)
    with cleared(ranks):
        said = [end(one) for one in ranks]
    assert [one.returncode for one in ranks] == [2, 2]
    for rank, text in enumerate(said):
        assert re.search(
            r"^ConfigError: rank 1 makes run \w{12}, rank 0 makes run \w{12}\. Give all processes one file\.", text
        )
        assert text.endswith(f"(raised on rank {rank} of 2 processes)\n")
    assert not [*tmp_path.glob("*/config.yaml")]


@pytest.mark.slow
def test_processes_with_different_engines_are_refused(tmp_path: Path) -> None:
    files = [file_of(small(tmp_path / name, engine=name), tmp_path) for name in ("ddp", "fsdp2")]
    ranks = by_hand(files)
    with cleared(ranks):
        said = [end(one) for one in ranks]
    assert [one.returncode for one in ranks] == [2, 2]
    assert all(re.match(r'ConfigError: rank 1 has engine \{"name":"fsdp2".*rank 0 has engine', one) for one in said)


@pytest.mark.slow
def test_bad_numbers_of_one_rank_are_refused_by_all(tmp_path: Path) -> None:
    file = file_of(small(tmp_path / "run", optimisation__rollouts=4, optimisation__lr=1e-4), tmp_path)
    said = ran(command(file, scenario="trouble"))
    assert counted(tmp_path / "run") == 2
    records = without_times(tmp_path / "run")
    assert [one["scorer/errors"] for one in records] == [8, 0, 0, 0]
    assert said.count("scorer raised on rank 1, reward 0: ValueError: no score") == 1
    assert [one.get("optimizer_steps/refused", 0) for one in records] == [0, 1, 1, 0]
    left, right = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert left.keys() == right.keys() == {0, 1, 3, "end"}

    def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(one[name], other[name]) for name in one)

    assert all(same(left[place], right[place]) for place in left)
    assert same(left[1], left[3]), "two refused rollouts change nothing"
    assert not same(left[0], left[1])
    assert not same(left[3], left["end"])


@pytest.mark.slow
def test_signals_and_advantages_of_the_user_on_two_ranks_equal_those_on_one(tmp_path: Path) -> None:
    settings = {"optimisation__lr": 1e-4, "optimisation__mini_batches": 2, "optimisation__refresh": "step"}
    alone = weighing(small(tmp_path / "one", STACK, **settings), "places")
    train(alone, console=quiet(), signals={"places": places}, advantages=fading)
    ran(command(file_of(small(tmp_path / "two", STACK, **settings), tmp_path), scenario="provided"))
    assert (counted(tmp_path / "one"), counted(tmp_path / "two")) == (1, 2)
    trained_alike(tmp_path / "one", tmp_path / "two")
