"""What a plan needs of other ranks: a sum and a gather. One process needs neither.

Measurements ask for them in rounds, so that methods that are settled together share one sum a round.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlstab.core.devices import on_cpu

Result = TypeVar("Result")
Key = TypeVar("Key")


@dataclass(frozen=True, eq=False)
class Sum:
    """Asks for the elementwise sum over ranks of a float64 tensor on the CPU, of the same shape on every rank."""

    values: Tensor


@dataclass(frozen=True, eq=False)
class Gather:
    """Asks for the concatenation over ranks of one-dimensional float64 tensors of any length."""

    values: Tensor


@dataclass(frozen=True, eq=False)
class Read:
    """Asks for tensors of this rank on the CPU: a list in the same order. No other rank takes part."""

    tensors: Sequence[Tensor]


#: Computes something from parts on several ranks: yields what it asks for, and is sent the answer.
Rounds: TypeAlias = Generator[Sum | Gather | Read, Any, Result]


class Comm(Protocol):
    """The collectives of a plan. Every rank calls them in the same order, including a rank without tokens."""

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks of a float64 tensor whose shape is the same on every rank."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Concatenation over ranks, in rank order, of one-dimensional float64 tensors of any length."""
        ...


class LocalComm:
    """One process: both collectives are the identity."""

    def sum(self, values: Tensor) -> Tensor:
        """Return ``values``."""
        return values

    gather = sum


class TorchComm:
    """``torch.distributed``: gloo on CPU, nccl on CUDA.

    Args:
        group: process group whose ranks share one optimizer step; None is the default group.
        device: the device on which the backend wants its tensors (``cuda`` for nccl).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self.group = group
        self.device = torch.device(device)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks."""
        total = values.to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def gather(self, values: Tensor) -> Tensor:
        """Ragged concatenation over ranks: lengths first, then rows padded to the longest."""
        world = dist.get_world_size(self.group)
        length = torch.tensor([values.numel()], dtype=torch.int64, device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(world)]
        dist.all_gather(lengths, length, group=self.group)
        sizes = [int(length) for length in lengths]
        padded = torch.zeros(max(sizes), dtype=values.dtype, device=self.device)
        padded[: values.numel()] = values
        rows = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(rows, padded, group=self.group)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)]).to(values.device)


def carried_out(rounds: Rounds[Result], comm: Comm) -> Result:
    """The result; the ranks do what it asks for."""
    try:
        request = next(rounds)
        while True:
            if isinstance(request, Read):
                request = rounds.send(on_cpu(request.tensors))
            else:
                request = rounds.send((comm.sum if isinstance(request, Sum) else comm.gather)(request.values))
    except StopIteration as end:
        result: Result = end.value
        return result


def side_by_side(computations: Mapping[Key, Rounds[Result]], local: bool) -> Rounds[dict[Key, Result]]:
    """The results of several: what they read in a round is one copy, and what they sum is one sum.

    Every rank has the same ones, and all ranks know what each round asks for. Where nothing travels (``local``), sums
    are free, and a read waits until the others have to read as well.
    """
    results: dict[Key, Result] = {}
    requests: dict[Key, Sum | Gather | Read] = {}
    answers: dict[Key, Any] = dict.fromkeys(computations)  # None starts a computation
    while answers:
        for key, answer in answers.items():
            requests.pop(key, None)
            try:
                requests[key] = computations[key].send(answer)
            except StopIteration as end:
                results[key] = end.value
        answers = {}
        reads = {key: request.tensors for key, request in requests.items() if isinstance(request, Read)}
        if reads and (not local or len(reads) == len(requests)):
            copies = iter((yield Read([tensor for tensors in reads.values() for tensor in tensors])))
            answers = {key: [next(copies) for _ in tensors] for key, tensors in reads.items()}
            continue  # they may read again
        sums = {key: request.values for key, request in requests.items() if isinstance(request, Sum)}
        if sums:
            total = yield Sum(torch.cat([values.reshape(-1) for values in sums.values()]))
            pieces = total.split([values.numel() for values in sums.values()])
            answers |= {key: piece.view(sums[key].shape) for key, piece in zip(sums, pieces, strict=True)}
        for key, request in requests.items():
            if isinstance(request, Gather):
                answers[key] = yield request
    return {key: results[key] for key in computations}
