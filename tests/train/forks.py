"""Several processes for little: one process imports everything and forks the ranks of a job.

With a launcher each rank would spend seconds on imports; launchers are tried in ``test_launch.py``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.train.runs import checkpoints, number

#: Nothing here takes a tenth of it; what takes longer hangs.
HANGS = 3600.0

#: The line in which a process says what it counted begins so.
COUNTED = "counted: "


@dataclass(frozen=True)
class Done:
    """What came of a job.

    Attributes:
        codes: with which the ranks ended, minus the signal where one ended them.
        said: what each printed.
    """

    codes: list[int | None]
    said: list[str] = field(repr=False)

    @property
    def counted(self) -> list[Any]:
        """What each process told that it counted."""
        told = [[line for line in text.splitlines() if line.startswith(COUNTED)] for text in self.said]
        return [json.loads(line.removeprefix(COUNTED)) for (line,) in told]


class Forks:
    """The process that forks; multiprocessing starts it with the first job."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.train.ranks"])

    def tries(
        self,
        file: Path,
        processes: int = 1,
        scenario: str = "plain",
        *,
        options: dict[str, Any] | None = None,
        victims: tuple[int, ...] = (),
        records: int = 0,
        checkpoint: int = 0,
        after: float = 0.0,
    ) -> Done:
        """Do a job, however it ends.

        Args:
            file: of the run.
            processes: that make it.
            scenario: a function of ``ranks.py``.
            options: for it.
            victims: the ranks that are killed, ``after`` so many seconds from when the run has as many ``records``, and
                the ``checkpoint`` of a rollout.
            records, checkpoint, after: see there.
        """
        logs, port = [Path(f"{file}.{rank}.log") for rank in range(processes)], free_port()
        ranks = [
            self._context.Process(target=_rank, args=(file, rank, processes, port, log, scenario, options or {}))
            for rank, log in enumerate(logs)
        ]
        deadline = time.monotonic() + HANGS
        for rank in ranks:
            rank.start()
        if victims:
            while not _reached(file, records, checkpoint) and time.monotonic() < deadline:
                time.sleep(0.002)
            time.sleep(after)
            for victim in victims:
                pid = ranks[victim].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
            rank.kill()
        return Done([rank.exitcode for rank in ranks], [log.read_text() for log in logs])

    def does(self, file: Path, processes: int = 1, scenario: str = "plain", **more: Any) -> Done:
        """Do a job that must end well."""
        done = self.tries(file, processes, scenario, **more)
        assert not any(done.codes), "\n".join(done.said)
        return done


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def print_to(log: Path) -> None:
    """Append what this process prints to a file."""
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _rank(file: Path, rank: int, processes: int, port: int, log: Path, scenario: str, options: dict[str, Any]) -> None:
    from tests.train import ranks

    log.write_text("")
    print_to(log)
    torch.set_num_threads(1)
    if processes > 1:
        met = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in met.items()}}
    getattr(ranks, scenario)(file, **options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _reached(file: Path, records: int, checkpoint: int) -> bool:
    """Whether the run is where its processes are to be killed."""
    out = Path(yaml.safe_load(file.read_text())["tracking"]["out"])
    metrics, kept = out / "metrics.jsonl", checkpoints(out)
    count = metrics.read_text().count("\n") if metrics.exists() else 0
    return count >= records and (not checkpoint or (bool(kept) and number(kept[-1]) >= checkpoint))
