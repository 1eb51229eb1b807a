"""Several processes for little: ``python -m tests.train.crews`` imports everything once and forks the ranks of a job.

A job is a line of JSON on standard input, and what came of it is a line on standard output. With a launcher each rank
would spend seconds on imports; the lines of the documents are tried in ``test_distributed.py``.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent

#: Nothing here takes a tenth of it; what takes longer hangs.
HANGS = 240.0


@dataclass(frozen=True)
class Job:
    """What a crew is to do.

    Attributes:
        file: of the run.
        processes: that make it.
        scenario: a function of ``ranks.py``.
        victim: the rank that is killed; None kills none.
        lines: records that there must be before.
        after: seconds from then on.
    """

    file: str
    processes: int
    scenario: str = "plain"
    victim: int | None = None
    lines: int = 0
    after: float = 0.0


@dataclass(frozen=True)
class Done:
    """What came of a job.

    Attributes:
        codes: with which the ranks ended, minus the signal where one ended them.
        said: what each printed.
        seconds: from the kill to the end of the last rank.
    """

    codes: list[int]
    said: list[str] = field(repr=False)
    seconds: float = 0.0

    @property
    def well(self) -> bool:
        return not any(self.codes)


class Crew:
    """The process that forks."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.train.crews"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tries(self, file: Path, processes: int, scenario: str = "plain", **more: Any) -> Done:
        assert self._server.stdin is not None and self._server.stdout is not None  # noqa: PT018
        self._server.stdin.write(json.dumps(asdict(Job(str(file), processes, scenario, **more))) + "\n")
        self._server.stdin.flush()
        return Done(**json.loads(self._server.stdout.readline()))

    def does(self, file: Path, processes: int, scenario: str = "plain", **more: Any) -> Done:
        """The same, which must end well."""
        done = self.tries(file, processes, scenario, **more)
        assert done.well, "\n".join(done.said)
        return done

    def end(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None  # noqa: PT018
        self._server.stdin.close()
        self._server.wait(HANGS)
        self._server.stdout.close()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _rank(job: Job, rank: int, port: int, log: Path) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        several = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.processes, "MASTER_PORT": port}
        if job.processes > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in several.items()}}
        try:
            from rlstab.train.processes import leave

            from tests.train import ranks

            getattr(ranks, job.scenario)(Path(job.file))
            leave()
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _lines(job: Job) -> int:
    """Records that there are; -1 until the processes have met and the first one holds the folder."""
    import yaml

    out = Path(yaml.safe_load(Path(job.file).read_text())["tracking"]["out"])
    metrics = out / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else (out / ".lock").exists() - 1


def _made(job: Job) -> Done:
    port = free_port()
    logs = [Path(f"{job.file}.{rank}.log") for rank in range(job.processes)]
    running = {_rank(job, rank, port, log): rank for rank, log in enumerate(logs)}
    pids, codes, began = dict(zip(running.values(), running, strict=True)), {}, time.monotonic()
    killed: float | None = None
    if job.victim is not None:
        while _lines(job) < job.lines and time.monotonic() < began + HANGS:
            time.sleep(0.005)
        time.sleep(job.after)
        os.kill(pids[job.victim], signal.SIGKILL)
        killed = time.monotonic()
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > began + HANGS:
            for one in running:
                os.kill(one, signal.SIGKILL)
        else:
            time.sleep(0.005)
    seconds = 0.0 if killed is None else time.monotonic() - killed
    return Done([codes[rank] for rank in range(job.processes)], [one.read_text() for one in logs], seconds)


def main() -> None:
    import torch

    from tests.train import kills, ranks  # noqa: F401  # imported once, before the forks

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(asdict(_made(Job(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
