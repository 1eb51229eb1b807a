"""Running an optimizer step: whole, in parts, or in parts over several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from rlstab.core.comm import Comm
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean
from rlstab.testing.steps import Step

T = TypeVar("T")


@dataclass
class Outcome:
    """What one optimizer step gave.

    Attributes:
        loss: summed over parts and ranks.
        gradients: by live output, in the order of the step's tokens.
        report: merged.
        state: for the next optimizer step.
        lr_scale: of the optimizer step.
    """

    loss: float
    gradients: dict[str, Tensor]
    report: dict[str, Mean] = field(default_factory=dict)
    state: State = field(default_factory=dict)
    lr_scale: float = 1.0

    @property
    def scale(self) -> float:
        """The size of what was summed: errors are relative to it, because a loss may cancel to nothing."""
        return 1.0 + abs(self.loss) + sum(float(one.abs().sum()) for one in self.gradients.values())


def run_whole(objective: TokenObjective, step: Step, state: State | None = None) -> Outcome:
    """The optimizer step in one batch."""
    return run_parts(objective, step, [list(range(len(step.sequence_ids)))], state)


def run_parts(
    objective: TokenObjective,
    step: Step,
    parts: Sequence[Sequence[int]],
    state: State | None = None,
    comm: Comm | None = None,
) -> Outcome:
    """The optimizer step in parts, each a list of sequence numbers."""
    pieces = [step.rows(part) for part in parts]
    batches = [piece.batch() for piece in pieces]
    plan = make_plan(objective, batches, state, comm)
    outcome = Outcome(
        0.0, {name: torch.zeros_like(one) for name, one in step.live.items()}, {}, plan.state, plan.lr_scale
    )
    for part, piece, batch in zip(parts, pieces, batches, strict=True):
        leaves = piece.leaves()
        out = plan.loss(batch, PolicyOutputs(**leaves))
        out.loss.backward()
        outcome.loss += out.loss.item()
        place = (step.sequence.unsqueeze(-1) == torch.tensor(list(part), dtype=torch.int64)).any(-1)
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                outcome.gradients[name][place] = leaf.grad
        for name, one in out.report.items():
            outcome.report[name] = outcome.report[name].merge(one) if name in outcome.report else one
    return outcome


class _Meeting:
    """Collectives between threads: every rank leaves its values, all wait, all read."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.left: list[Tensor] = [torch.zeros(0)] * ranks

    def exchange(self, rank: int, values: Tensor) -> list[Tensor]:
        self.left[rank] = values.clone()
        self.barrier.wait()
        seen = list(self.left)
        self.barrier.wait()
        return seen


class _ThreadComm:
    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, values)).sum(0)

    def gather(self, values: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.rank, values))


def run_ranks(
    objective: TokenObjective, step: Step, ranks: Sequence[Sequence[Sequence[int]]], state: State | None = None
) -> list[Outcome]:
    """What each rank found on its parts of the optimizer step, one thread each; a rank may be empty.

    :meth:`rlstab.testing.Processes.run_ranks` is the same in real processes.
    """
    return in_threads(len(ranks), lambda rank, comm: run_parts(objective, step, ranks[rank], state, comm))


def in_threads(count: int, work: Callable[[int, Comm], T]) -> list[T]:
    """What each of ``count`` ranks finds, in rank order: one thread each, given its rank and its collectives."""
    meeting = _Meeting(count)
    errors: list[BaseException] = []
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, _ThreadComm(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error
    return [results[rank] for rank in range(count)]


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcomes of ranks as that of the step: losses, gradients and metrics add up, the state is that of each."""
    first = outcomes[0]
    total = Outcome(
        0.0, {name: torch.zeros_like(one) for name, one in first.gradients.items()}, {}, first.state, first.lr_scale
    )
    for one in outcomes:
        total.loss += one.loss
        for name, gradient in one.gradients.items():
            total.gradients[name] = total.gradients[name] + gradient
        for name, mean in one.report.items():
            total.report[name] = total.report[name].merge(mean) if name in total.report else mean
    return total
