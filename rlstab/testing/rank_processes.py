"""Ranks as real processes: workers in a gloo group, each of which runs its share of every optimizer step."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlstab.core.comm import TorchComm
from rlstab.core.method import Method
from rlstab.core.objective import State, TokenObjective
from rlstab.errors import ProcessError
from rlstab.testing.outcome import Outcome, run_parts
from rlstab.testing.steps import Step

Answer = TypeVar("Answer")


class Processes:
    """``count`` processes of this machine that share optimizer steps, a rank each, over gloo.

    They are started by spawn when they are first needed, and end with the ``with`` block. One that raises, dies or
    hangs ends them all; the next objective starts them again::

        with Processes(2) as processes:
            print(check_objective(MyMethod(), processes=processes))
            print(check_objective(compose(MyMethod(), ClipHigher()), processes=processes))

    Args:
        count: how many, at least 2.
        timeout: seconds that the processes may take to start, and those that one optimizer step may take.

    Attributes:
        counted: how many took part, as each of them counted by a sum over all; 0 before they started.
        steps: optimizer steps, and rollouts of stages, that they have run.
        empty_ranks: how often a rank had no part of one.

    Raises:
        ValueError: ``count`` is less than 2.
    """

    def __init__(self, count: int, timeout: float = 60.0) -> None:
        if count < 2:
            raise ValueError(
                f"processes is {count}; ranks are compared from 2 on. Leave it out to check in one process."
            )
        self.count, self.timeout = count, timeout
        self.counted = self.steps = self.empty_ranks = 0
        self._workers: list[BaseProcess] = []
        self._links: list[Connection] = []
        self._ended: tuple[Method[Any], Exception] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{self.counted} gloo processes, {self.steps} optimizer steps, {self.empty_ranks} ranks without a part"

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        for link in self._links:
            link.close()
        self._workers, self._links = [], []

    def run_ranks(
        self,
        objective: TokenObjective,
        step: Step,
        ranks: Sequence[Sequence[Sequence[int]]],
        state: State | None = None,
    ) -> list[Outcome]:
        """What each rank found on its parts, in rank order; a rank may be empty.

        Raises:
            ProcessError: a process died or hung, or the method cannot be sent to it.
            RuntimeError: the method raised on a rank, now or in an earlier step.
        """
        jobs = [(objective, step, parts, state) for parts in ranks]
        return self.each(objective, run_parts, jobs, empty=sum(not any(parts) for parts in ranks))

    def each(
        self,
        method: Method[Any],
        work: Callable[..., Answer],
        jobs: Sequence[tuple[Any, ...]],
        *,
        empty: int = 0,
        what: str = "an optimizer step",
    ) -> list[Answer]:
        """What ``work(*job, comm)`` gives on each rank, in rank order.

        Args:
            method: what is checked; after it raised it is not run again.
            work: a function of a module.
            jobs: one a rank.
            empty: how many of them have no part.
            what: they are, in errors.

        Raises:
            ProcessError: a process died or hung, or the method cannot be sent to it.
            RuntimeError: the method raised on a rank, now or in an earlier step.
        """
        try:
            sent = [pickle.dumps((work, job)) for job in jobs]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ProcessError(
                f"{method!r} cannot be sent to another process: {error}. Define its class at the top of a module."
            ) from error
        if self._ended is None or self._ended[0] is not method:
            try:
                answers = self._run(sent, what)
            except Exception as error:
                self._ended = method, error
                self.close()  # the others may wait for the one that raised
            else:
                self.steps += 1
                self.empty_ranks += empty
                return answers
        raise self._ended[1]

    def _run(self, jobs: Sequence[bytes], what: str) -> list[Any]:
        if not self._workers:
            self._start()
        for link, job in zip(self._links, jobs, strict=True):
            with suppress(BrokenPipeError):  # one that died is told of when it does not answer
                link.send_bytes(job)
        return self._answers(what)

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(self.count):
                link, theirs = context.Pipe()
                place = (rank, self.count, str(Path(folder) / "meet"), self.timeout)
                worker = context.Process(target=_work, args=(theirs, *place), daemon=True)
                worker.start()
                theirs.close()
                self._workers.append(worker)
                self._links.append(link)
            counts = self._answers("their start")
        assert counts == [self.count] * self.count, counts
        self.counted = self.count

    def _answers(self, what: str) -> list[Any]:
        """One answer of each process."""
        found: dict[int, Any] = {}
        by = time.monotonic() + self.timeout
        while len(found) < self.count:
            missing = {self._links[rank]: rank for rank in range(self.count) if rank not in found}
            ready = wait(list(missing), max(0.0, by - time.monotonic()))
            if not ready:
                silent = ", ".join(map(str, missing.values()))
                raise ProcessError(
                    f"rank {silent} of {self.count} processes did not answer within {self.timeout:g} s of {what}. "
                    "Look for what hangs there, or give Processes a longer timeout."
                )
            for link in ready:
                rank = missing[link]  # type: ignore[index]  # a Connection, as given
                found[rank] = self._answer(rank, what)
        return [found[rank] for rank in range(self.count)]

    def _answer(self, rank: int, what: str) -> Any:
        try:
            answer = pickle.loads(self._links[rank].recv_bytes())
        except (EOFError, ConnectionError) as error:
            self._workers[rank].join(self.timeout)
            raise ProcessError(
                f"rank {rank} of {self.count} processes died during {what} (exit code {self._workers[rank].exitcode}). "
                "Its output says why; a script needs `if __name__ == '__main__':` around what starts processes."
            ) from error
        if isinstance(answer, str):
            raise RuntimeError(f"rank {rank} of {self.count} processes raised {answer}")
        return answer


def _work(link: Connection, rank: int, count: int, meet: str, timeout: float) -> None:
    """One process: it joins, says how many joined, and runs what it is sent until the link is closed."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=count, timeout=limit)
    comm = TorchComm()
    link.send_bytes(pickle.dumps(int(comm.sum(torch.ones(1, dtype=torch.float64)))))
    while True:
        try:
            job = link.recv_bytes()
        except EOFError:  # the process that started this one has gone
            return
        try:
            work, given = pickle.loads(job)
            answer = pickle.dumps(work(*given, comm))
        except Exception as error:
            answer = pickle.dumps(f"{type(error).__name__}: {error}")
        link.send_bytes(answer)
