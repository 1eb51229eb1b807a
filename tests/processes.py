"""Ranks as real processes: workers in a gloo group, each of which runs its share of every optimizer step."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlstab.core.comm import TorchComm
from rlstab.core.method import Method
from rlstab.core.objective import State, TokenObjective
from rlstab.errors import ProcessError
from rlstab.testing.run import StepOutcome, run_parts
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
        self._pools: list[ProcessPoolExecutor] = []
        self._ended: tuple[Method[Any], Exception] | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{self.counted} gloo processes, {self.steps} optimizer steps, {self.empty_ranks} ranks without a part"

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools:
            for process in list((pool._processes or {}).values()):  # they may hang
                process.kill()
            pool.shutdown()
        self._pools = []

    def run_ranks(
        self,
        objective: TokenObjective,
        step: Step,
        ranks: Sequence[Sequence[Sequence[int]]],
        state: State | None = None,
    ) -> list[StepOutcome]:
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
            pickled = [pickle.dumps((work, job)) for job in jobs]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ProcessError(
                f"{method!r} cannot be sent to another process: {error}. Define its class at the top of a module."
            ) from error
        if self._ended is not None and self._ended[0] is method:
            raise self._ended[1]
        try:
            if not self._pools:
                self._start()
            answers = self._answers(
                [pool.submit(_run, job) for pool, job in zip(self._pools, pickled, strict=True)], what
            )
        except Exception as error:
            self._ended = method, error
            self.close()  # the others may wait for the one that raised
            raise
        self.steps += 1
        self.empty_ranks += empty
        return answers

    def _start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        # one pool for each rank, so that a job goes to the process of its rank
        self._pools = [ProcessPoolExecutor(1, context) for _ in range(self.count)]
        with tempfile.TemporaryDirectory() as folder:
            place = str(Path(folder) / "meet")
            joins = [pool.submit(_join, rank, self.count, place, self.timeout) for rank, pool in enumerate(self._pools)]
            counts = self._answers(joins, "their start")
        assert counts == [self.count] * self.count, counts
        self.counted = self.count

    def _answers(self, futures: Sequence[Future[Any]], what: str) -> list[Any]:
        """One answer of each process; the first error ends the wait, for the other ranks may wait for that one."""
        done, pending = wait(futures, self.timeout, return_when="FIRST_EXCEPTION")
        for rank, future in enumerate(futures):
            error = future.exception() if future in done else None
            if isinstance(error, BrokenProcessPool):
                raise ProcessError(
                    f"rank {rank} of {self.count} processes died during {what}. Its output says why; a script needs "
                    f"`if __name__ == '__main__':` around what starts processes."
                ) from error
            if error is not None:
                raise RuntimeError(f"rank {rank} of {self.count} processes raised {type(error).__name__}: {error}")
        if pending:
            silent = ", ".join(str(rank) for rank, future in enumerate(futures) if future in pending)
            raise ProcessError(
                f"rank {silent} of {self.count} processes did not answer within {self.timeout:g} s of {what}. "
                "Look for what hangs there, or give Processes a longer timeout."
            )
        return [future.result() for future in futures]


def _join(rank: int, count: int, place: str, timeout: float) -> int:
    """Of a process, once: join the group, and say how many joined."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=count, timeout=limit)
    return int(TorchComm().sum(torch.ones(1, dtype=torch.float64)))


def _run(job: bytes) -> Any:
    work, given = pickle.loads(job)
    return work(*given, TorchComm())
