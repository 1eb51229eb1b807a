"""Several processes at little cost: one process imports everything and forks the ranks of a job.

With a launcher each rank would spend seconds on imports; launchers are tried in ``test_launch.py``.
"""

import json
import multiprocessing
import os
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

#: How a line begins in which a process reports a count.
COUNTED = "counted: "


@dataclass(frozen=True)
class Done:
    """The result of a job: the code of each rank, minus the signal where one ended it, and what each printed."""

    codes: list[int | None]
    said: list[str] = field(repr=False)

    @property
    def counted(self) -> list[Any]:
        """What each process told that it counted."""
        return [json.loads(text.partition(COUNTED)[2].partition("\n")[0]) for text in self.said]


def forkserver() -> Any:
    """A process has one fork server, which preloads what was asked of it first, so everything asks for the same."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.ranks"])
    return context


class Forks:
    """The process that forks; multiprocessing starts it with the first job."""

    def __init__(self) -> None:
        self._context = forkserver()

    def starts(self, file: Path, processes: int = 1, scenario: str = "plain", **options: Any) -> list[Any]:
        """Start the ranks of a run and leave them to it; a scenario is a function of ``ranks.py``, and has options."""
        port = free_port()
        ranks = [
            self._context.Process(target=_rank, args=(file, rank, processes, port, scenario, options))
            for rank in range(processes)
        ]
        for rank in ranks:
            rank.start()
        return ranks

    def tries(
        self,
        file: Path,
        processes: int = 1,
        scenario: str = "plain",
        *,
        kill_at: tuple[int, int] | None = None,
        **options: Any,
    ) -> Done:
        """Run a job, however it ends; ``kill_at``: kills all ranks once it has these records and that checkpoint."""
        deadline, ranks = time.monotonic() + HANGS, self.starts(file, processes, scenario, **options)
        if kill_at is not None:
            out = Path(yaml.safe_load(file.read_text())["tracking"]["out"])
            while not _reached(out, *kill_at) and time.monotonic() < deadline:
                time.sleep(0.005)
            for rank in ranks:  # all at once: a rank that loses another ends by itself
                rank.kill()
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
            rank.kill()
        return Done([rank.exitcode for rank in ranks], [log_of(file, rank).read_text() for rank in range(processes)])

    def does(self, *job: Any, **options: Any) -> Done:
        """Run a job that must succeed."""
        done = self.tries(*job, **options)
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
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a file, here


def log_of(file: Path, rank: int) -> Path:
    """What a rank of a run printed."""
    return Path(f"{file}.{rank}.log")


def _rank(file: Path, rank: int, processes: int, port: int, scenario: str, options: dict[str, Any]) -> None:
    from tests.train import ranks

    log_of(file, rank).write_text("")
    print_to(log_of(file, rank))
    torch.set_num_threads(1)
    # as torchrun does, also for one
    met = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in met.items()}}
    getattr(ranks, scenario)(file, **options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _reached(out: Path, records: int, checkpoint: int) -> bool:
    """Whether the run is where its processes are to be killed."""
    metrics, kept = out / "metrics.jsonl", checkpoints(out)
    count = metrics.read_text().count("\n") if metrics.exists() else 0
    return count >= records and (not checkpoint or (bool(kept) and number(kept[-1]) >= checkpoint))
