"""Runs an optimizer step whole, in parts, or in parts over several ranks, each a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlstab.core.comm import Comm
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean
from rlstab.testing.steps import Step

T = TypeVar("T")


@dataclass(kw_only=True)
class RunOutcome:
    """The outcome of one optimizer step or one rollout.

    Attributes:
        report: merged over parts.
        state: for the next one.
    """

    report: dict[str, Mean] = field(default_factory=dict)
    state: State = field(default_factory=dict)

    def add_report(self, report: Mapping[str, Mean]) -> None:
        """Merge the metrics of another part."""
        for name, mean in report.items():
            self.report[name] = self.report[name].merge(mean) if name in self.report else mean


@dataclass
class StepOutcome(RunOutcome):
    """The outcome of one optimizer step.

    Attributes:
        loss: summed over parts and ranks.
        gradients: by live output, in the order of the step's tokens.
        lr_scale: of the optimizer step.
    """

    loss: float
    gradients: dict[str, Tensor]
    lr_scale: float = 1.0

    @property
    def scale(self) -> float:
        """The sum of magnitudes, to which errors are relative, because a loss may cancel to nothing."""
        return 1.0 + abs(self.loss) + sum(float(gradient.abs().sum()) for gradient in self.gradients.values())


def run_whole(objective: TokenObjective, step: Step, state: State | None = None) -> StepOutcome:
    """The optimizer step in one batch."""
    return run_parts(objective, step, [list(range(len(step.sequence_ids)))], state)


def run_chain(method: Any, chain: Sequence[Any], run: Callable[..., Any] = run_whole) -> list[Any]:
    """Consecutive optimizer steps, or rollouts of a stage, from the initial state."""
    outcomes: list[Any] = []
    for given in chain:
        outcomes.append(run(method, given, outcomes[-1].state if outcomes else None))
    return outcomes


def run_parts(
    objective: TokenObjective,
    step: Step,
    parts: Sequence[Sequence[int]],
    state: State | None = None,
    comm: Comm | None = None,
) -> StepOutcome:
    """The optimizer step in parts, each a list of sequence numbers."""
    pieces = [step.rows(part) for part in parts]
    batches = [piece.batch() for piece in pieces]
    plan = make_plan(objective, batches, state, comm)
    gradients = {name: torch.zeros_like(values) for name, values in step.live.items()}
    outcome = StepOutcome(0.0, gradients, plan.lr_scale, state=plan.state)
    for part, piece, batch in zip(parts, pieces, batches, strict=True):
        leaves = piece.leaves()
        out = plan.loss(batch, PolicyOutputs(**leaves))
        out.loss.backward()
        outcome.loss += out.loss.item()
        outcome.add_report(out.report)
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[name][step.indices(part)] = leaf.grad
    return outcome


def joined(outcomes: Sequence[StepOutcome]) -> StepOutcome:
    """The outcomes of ranks as that of the step: losses, gradients and metrics add up, and all ranks have its state."""
    gradients = {
        name: torch.stack([outcome.gradients[name] for outcome in outcomes]).sum(0) for name in outcomes[0].gradients
    }
    total = replace(outcomes[0], loss=sum(outcome.loss for outcome in outcomes), gradients=gradients, report={})
    for outcome in outcomes:
        total.add_report(outcome.report)
    return total


class ThreadComm:
    """Collectives between threads: every rank leaves its values, all wait, all read.

    Attributes:
        rank: of this thread.
        meeting: the barrier of the threads, and their values.
    """

    def __init__(self, rank: int, meeting: tuple[threading.Barrier, list[Tensor]]) -> None:
        self.rank, self.meeting = rank, meeting

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks."""
        return torch.stack(self._exchanged(values)).sum(0)

    def gather(self, values: Tensor) -> Tensor:
        """The values of all ranks, in rank order."""
        return torch.cat(self._exchanged(values))

    def _exchanged(self, values: Tensor) -> list[Tensor]:
        barrier, left = self.meeting
        left[self.rank] = values.clone()
        barrier.wait()
        seen = list(left)
        barrier.wait()
        return seen


def run_ranks(
    objective: TokenObjective, step: Step, ranks: Sequence[Sequence[Sequence[int]]], state: State | None = None
) -> list[StepOutcome]:
    """The outcome of each rank on its parts of the optimizer step, one thread each; a rank may be empty."""
    return in_threads(len(ranks), lambda rank, comm: run_parts(objective, step, ranks[rank], state, comm))


def in_threads(count: int, work: Callable[[int, Comm], T]) -> list[T]:
    """The results of ``count`` ranks, in rank order: one thread each, with its rank and its collectives."""
    meeting = threading.Barrier(count, timeout=30), [torch.zeros(0)] * count

    def run(rank: int) -> T:
        try:
            return work(rank, ThreadComm(rank, meeting))
        except BaseException:
            meeting[0].abort()
            raise

    with ThreadPoolExecutor(count) as threads:
        results = [threads.submit(run, rank) for rank in range(count)]
    errors = [error for result in results if (error := result.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [result.result() for result in results]
