"""Several processes for little: ``python -m tests.train.forks`` imports everything once and forks the ranks of a job.

A job is a line of JSON on standard input, and what came of it is a line on standard output. With a launcher each rank
would spend seconds on imports; launchers are tried in ``test_launch.py``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent

#: Nothing here takes a tenth of it; what takes longer hangs.
HANGS = 3600.0


@dataclass(frozen=True)
class Job:
    """What is to be done.

    Attributes:
        file: of the run.
        processes: that make it.
        scenario: a function of ``ranks.py``.
        options: for it.
        victims: the ranks that are killed.
        records: that there must be before.
        checkpoint: of a rollout, that there must be before.
        after: seconds from then on.
    """

    file: str
    processes: int = 1
    scenario: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)
    victims: list[int] = field(default_factory=list)
    records: int = 0
    checkpoint: int = 0
    after: float = 0.0


@dataclass(frozen=True)
class Done:
    """What came of a job.

    Attributes:
        codes: with which the ranks ended, minus the signal where one ended them.
        said: what each printed.
    """

    codes: list[int]
    said: list[str] = field(repr=False)

    @property
    def counted(self) -> list[Any]:
        """What each process told that it counted."""
        from tests.train.ranks import COUNTED

        told = [[line for line in text.splitlines() if line.startswith(COUNTED)] for text in self.said]
        return [json.loads(line.removeprefix(COUNTED)) for (line,) in told]


class Forks:
    """The process that forks."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.train.forks"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tries(self, file: Path, processes: int = 1, scenario: str = "plain", **more: Any) -> Done:
        """Do a job, however it ends."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asdict(Job(str(file), processes, scenario, **more))) + "\n")
        self._server.stdin.flush()
        return Done(**json.loads(self._server.stdout.readline()))

    def does(self, file: Path, processes: int = 1, scenario: str = "plain", **more: Any) -> Done:
        """Do a job that must end well."""
        done = self.tries(file, processes, scenario, **more)
        assert not any(done.codes), "\n".join(done.said)
        return done

    def end(self) -> None:
        """Let the process go."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(HANGS)
        self._server.stdout.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start(do: Callable[[], Any], log: Path, environment: dict[str, str] | None = None, failed: int = 1) -> int:
    """Fork a process that does something and ends; its id. What it prints is appended to a file."""
    process = os.fork()
    if process:
        return process
    code = failed
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        os.environ |= environment or {}
        try:
            code = do() or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _rank(job: Job, rank: int, port: int, log: Path) -> int:
    def do() -> None:
        import torch.distributed

        from tests.train import ranks

        getattr(ranks, job.scenario)(Path(job.file), **job.options)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    several = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.processes, "MASTER_PORT": port}
    met = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in several.items()}}
    log.write_text("")
    return start(do, log, met if job.processes > 1 else None)


def _reached(job: Job) -> bool:
    """Whether the run is where its processes are to be killed."""
    import yaml

    from tests.train.runs import checkpoints, number

    out = Path(yaml.safe_load(Path(job.file).read_text())["tracking"]["out"])
    metrics, kept = out / "metrics.jsonl", checkpoints(out)
    count = metrics.read_text().count("\n") if metrics.exists() else 0
    return count >= job.records and (not job.checkpoint or (bool(kept) and number(kept[-1]) >= job.checkpoint))


def _made(job: Job) -> Done:
    port = free_port()
    logs = [Path(f"{job.file}.{rank}.log") for rank in range(job.processes)]
    running = {_rank(job, rank, port, log): rank for rank, log in enumerate(logs)}
    pids, codes, began = dict(zip(running.values(), running, strict=True)), {}, time.monotonic()
    if job.victims:
        while not _reached(job) and time.monotonic() < began + HANGS:
            time.sleep(0.002)
        time.sleep(job.after)
        for rank in job.victims:
            os.kill(pids[rank], signal.SIGKILL)
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > began + HANGS:
            for process in running:
                os.kill(process, signal.SIGKILL)
        else:
            time.sleep(0.005)
    return Done([codes[rank] for rank in range(job.processes)], [log.read_text() for log in logs])


def main() -> None:
    import torch

    from tests.train import ranks, runs  # noqa: F401  # imported once, before the forks

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(asdict(_made(Job(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
