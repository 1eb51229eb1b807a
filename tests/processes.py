"""Ranks as real processes: workers in a gloo group, each of which runs its share of a job."""

import pickle
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from rlstab.core.comm import TorchComm
from tests.train.forks import forkserver

Answer = TypeVar("Answer")

#: Seconds that the processes may take to start, and those that one optimizer step may take.
TIMEOUT = 60.0


class Processes:
    """``count`` processes of this machine, a rank each, over gloo, in a ``with`` block.

    ``counted`` is how many take part, as each of them counted by a sum over all.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> Self:
        context = forkserver()
        # one pool for each rank, so that a job goes to the process of its rank
        self._pools = [ProcessPoolExecutor(1, context) for _ in range(self.count)]
        with tempfile.TemporaryDirectory() as folder:
            joins = [pool.submit(_join, rank, self.count, f"{folder}/meeting") for rank, pool in enumerate(self._pools)]
            (self.counted,) = {join.result(TIMEOUT) for join in joins}
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools:
            for process in list((pool._processes or {}).values()):  # they may hang
                process.kill()
            pool.shutdown()

    def each(self, work: Callable[..., Answer], jobs: Sequence[tuple[Any, ...]]) -> list[Answer]:
        """What ``work(*job, comm)``, a function of a module, gives on each rank, in rank order."""
        pickled = [pickle.dumps((work, job)) for job in jobs]
        futures = [pool.submit(_run, job) for pool, job in zip(self._pools, pickled, strict=True)]
        return [future.result(TIMEOUT) for future in futures]


def _join(rank: int, count: int, place: str) -> int:
    """Of a process, once: join the group, and say how many joined."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=count, timeout=limit)
    return int(TorchComm().sum(torch.ones(1, dtype=torch.float64)))


def _run(job: bytes) -> Any:
    work, given = pickle.loads(job)
    return work(*given, TorchComm())
