"""Runs an optimizer step, or a rollout of a stage: whole, in parts, or in parts over several ranks, each a thread."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from rlstab.core.comm import Comm, LocalComm
from rlstab.core.method import Method, State, measure_all
from rlstab.core.metrics import RunningMeans
from rlstab.core.objective import TokenObjective
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator, Offer, PromptSelector, RewardShaper, RolloutExpander, Stage
from rlstab.testing.agreement import BrokenLaw, near, same_report, same_state
from rlstab.testing.rollouts import Rollout
from rlstab.testing.steps import Step

T = TypeVar("T")
#: Parts of one rank, each a list of numbers of sequences or groups.
Parts: TypeAlias = Sequence[Sequence[int]]
#: Results of responses, by name and sequence id: ``(1,)``, or a number for each sampled token.
RowsByName: TypeAlias = dict[str, dict[int, Tensor]]


@dataclass(kw_only=True)
class RunOutcome(ABC):
    """The outcome of one optimizer step or one rollout.

    Attributes:
        report: merged over parts.
        state: the state for the next one.
    """

    report: RunningMeans = field(default_factory=RunningMeans)
    state: State = field(default_factory=dict)

    @property
    @abstractmethod
    def values(self) -> Iterable[tuple[str, Any]]:
        """The results, with their names."""

    @property
    @abstractmethod
    def shared(self) -> Mapping[str, Any]:
        """What is the same on every rank, beyond the state."""

    @abstractmethod
    def summed(self, outcomes: Sequence[Any]) -> Self:
        """The results of parts or ranks as those of the whole; this is the first of them."""

    def require_same(self, label: str, other: Any, tolerance: float) -> None:
        """Require that results, metrics and state agree with those of another run.

        Raises:
            BrokenLaw: says what differs.
        """
        same_state(label, self.shared, other.shared, tolerance)
        same_report(label, self.report, other.report, tolerance)
        same_state(f"{label}: the state", self.state, other.state, tolerance)


@dataclass
class StepOutcome(RunOutcome):
    """The outcome of one optimizer step.

    Attributes:
        loss: summed over parts and ranks.
        gradients: by live output, in the order of the step's tokens.
        lr_scale: the factor of the learning rate in the optimizer step.
    """

    loss: float
    gradients: dict[str, Tensor]
    lr_scale: float = 1.0

    @property
    def scale(self) -> float:
        """The sum of magnitudes, to which errors are relative, because a loss may cancel to nothing."""
        return 1.0 + abs(self.loss) + sum(float(gradient.abs().sum()) for gradient in self.gradients.values())

    @property
    def values(self) -> Iterable[tuple[str, Any]]:
        """Loss, learning-rate scale and gradients."""
        gradients = ((f"the gradient of '{name}'", gradient) for name, gradient in self.gradients.items())
        return ("the loss", self.loss), ("lr_scale", self.lr_scale), *gradients

    @property
    def shared(self) -> Mapping[str, Any]:
        """The learning-rate scale."""
        return {"lr_scale": self.lr_scale}

    def summed(self, outcomes: Sequence[StepOutcome]) -> StepOutcome:
        """Losses and gradients add up."""
        gradients = {name: torch.stack([part.gradients[name] for part in outcomes]).sum(0) for name in self.gradients}
        return replace(self, loss=sum(part.loss for part in outcomes), gradients=gradients, report=RunningMeans())

    def require_same(self, label: str, other: StepOutcome, tolerance: float) -> None:
        """Require that loss and gradients agree, too."""
        within = tolerance * max(self.scale, other.scale)
        near(f"{label}: the loss", self.loss, other.loss, within)
        for name, gradient in self.gradients.items():
            worst = float((gradient - other.gradients[name]).abs().max()) if gradient.numel() else 0.0
            if not worst <= within:
                raise BrokenLaw(f"{label}: the gradient of '{name}' moves by {worst:.3g}.")
        super().require_same(label, other, tolerance)


@dataclass
class StageOutcome(RunOutcome):
    """The outcome of a stage in one rollout, on one rank or on all.

    Attributes:
        rows: the results of each response.
        numbers: by name, results that are the same on every part.
        chosen: the prompts of a selector.
        stat: the statistics of the whole rollout.
    """

    rows: RowsByName
    numbers: dict[str, int]
    chosen: Tensor | None
    stat: Settled

    @property
    def values(self) -> Iterable[tuple[str, Any]]:
        """The results of each response."""
        return [(name, row) for name, rows in self.rows.items() for row in rows.values()]

    @property
    def shared(self) -> Mapping[str, Any]:
        """The choice of a selector."""
        return {"the choice": self.chosen}

    def summed(self, outcomes: Sequence[StageOutcome]) -> StageOutcome:
        """All responses; numbers must agree."""
        total = replace(self, rows={name: {} for name in self.rows}, numbers={}, report=RunningMeans())
        for outcome in outcomes:
            for name, rows in outcome.rows.items():
                total.rows[name].update(rows)
            for name, number in outcome.numbers.items():
                if total.numbers.setdefault(name, number) != number:
                    raise BrokenLaw(f"'{name}' is {total.numbers[name]} on one part and {number} on another.")
        return total

    def require_same(self, label: str, other: StageOutcome, tolerance: float) -> None:
        """Require that numbers and the results of each response agree, too."""
        same_state(f"{label}: what it asks for", self.numbers, other.numbers, 0.0)
        same_rows(label, self.rows, other.rows, tolerance)
        super().require_same(label, other, tolerance)


def same_rows(label: str, rows_of_some: RowsByName, among: RowsByName, tolerance: float) -> None:
    """Require that some responses have the results that they have among others, within ``tolerance`` of the largest.

    Raises:
        BrokenLaw: says what differs.
    """
    for name, rows in rows_of_some.items():
        sizes = [float(row.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max()) for row in rows.values()]
        within = tolerance * (1 + max(sizes, default=0.0))
        for response, row in rows.items():
            value, other_value = torch.broadcast_tensors(row.double(), among[name][response].double())
            if not torch.allclose(value, other_value, rtol=0.0, atol=within, equal_nan=True):
                raise BrokenLaw(f"{label}: {name} of a response is {value.tolist()} and {other_value.tolist()}.")


def joined(outcomes: Sequence[T]) -> T:
    """The outcomes of parts or ranks as that of the whole: results and metrics add up, and all have its state.

    Raises:
        BrokenLaw: they disagree about what must be the same everywhere.
    """
    first: Any = outcomes[0]
    total = first.summed(outcomes)
    outcome: Any
    for rank, outcome in enumerate(outcomes):
        same_state(f"on rank 0 and on rank {rank}:", first.shared, outcome.shared, 0.0)
        same_state(f"on rank 0 and on rank {rank}: the state", first.state, outcome.state, 0.0)
        total.report.add(outcome.report)
    return total  # type: ignore[no-any-return]  # an outcome of the same class


# -- running -----------------------------------------------------------------------------------------------------------


def run_whole(method: Method[Any], item: Any, state: State | None = None) -> Any:
    """The outcome of an optimizer step, or of a rollout of a stage, in one part."""
    return run_parts(method, item, [item.units], state)


def run_chain(method: Method[Any], chain: Sequence[Any]) -> list[Any]:
    """The outcomes of consecutive optimizer steps, or rollouts of a stage, from the initial state."""
    outcomes: list[Any] = []
    for item in chain:
        outcomes.append(run_whole(method, item, outcomes[-1].state if outcomes else None))
    return outcomes


def run_parts(
    method: Method[Any], item: Any, parts: Parts, state: State | None = None, comm: Comm | None = None
) -> Any:
    """The outcome of an optimizer step, or of a rollout of a stage, in parts; without a state, from the initial one."""
    run: Callable[..., RunOutcome] = _run_stage if isinstance(method, Stage) else _run_step
    return run(method, item, parts, method.init_state() if state is None else state, comm or LocalComm())


def run_ranks(method: Method[Any], item: Any, ranks: Sequence[Parts], state: State | None = None) -> list[Any]:
    """The outcome of each rank on its parts, one thread each; a rank may be empty."""
    return in_threads(len(ranks), lambda rank, comm: run_parts(method, item, ranks[rank], state, comm))


def _run_step(objective: TokenObjective, step: Step, parts: Parts, state: State, comm: Comm) -> StepOutcome:
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
        outcome.report.add(out.report)
        tokens = step.indices(part)
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[name][tokens] = leaf.grad
    return outcome


def _run_stage(stage: Stage, rollout: Rollout, parts: Parts, state: State, comm: Comm) -> StageOutcome:
    chosen = choose(stage, rollout.offer, state)
    batches = [rollout.part(part, chosen) for part in parts]
    stat, after = measure_all(stage, batches, state, comm)
    empty, *outcomes = [_outcome(stage, batch, stat, state, rollout.offer) for batch in (stage._empty_part(), *batches)]
    return replace(joined(outcomes or [empty]), chosen=chosen, state=after)


def _outcome(stage: Stage, batch: ResponseBatch, stat: Settled, state: State, offer: Offer) -> StageOutcome:
    values: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    result = act(stage, batch, stat, state, offer)
    if isinstance(stage, RolloutExpander):
        zeros, no_ids = torch.zeros(len(batch), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        parents = no_ids if result.parents is None else result.parents
        values["drop"] = zeros if result.drop is None else result.drop
        values["the pivot"] = zeros.index_add(0, parents, no_ids if result.pivots is None else result.pivots)
        numbers = {"fresh": result.fresh, **({"branches": result.branches} if len(parents) else {})}
    elif isinstance(stage, RewardShaper | AdvantageEstimator):
        values["the reward" if isinstance(stage, RewardShaper) else "the advantage"] = result
    ids, lengths = batch.sequence_ids.tolist(), batch.lengths.long().tolist()
    rows = {
        name: {owner: row.reshape(-1)[:length] for owner, row, length in zip(ids, of_all, lengths, strict=True)}
        for name, of_all in values.items()
    }
    return StageOutcome(rows, numbers, None, stat, report=RunningMeans(stage.report(batch, stat, state)))


def choose(stage: Stage, offer: Offer, state: State) -> Any:
    """The prompts that a selector chooses; None for other stages."""
    if not isinstance(stage, PromptSelector):
        return None
    chosen = stage.select(offer, state)
    _check_tensor("select", chosen, torch.int64, (offer.count,))
    return chosen


def act(stage: Stage, batch: ResponseBatch, stat: Settled, state: State, offer: Offer) -> Any:
    """The results of a stage on one part, as it returns them.

    Raises:
        BrokenLaw: their shape, dtype or range is not that of its kind.
    """
    if isinstance(stage, PromptSelector):
        return choose(stage, offer, state)
    if isinstance(stage, RolloutExpander):
        expansion = stage.expand(batch, stat, state, offer.seed)
        expansion.require(stage.name, batch)
        if expansion.drop is not None and bool((batch.group_mean(expansion.drop) % 1 != 0).any()):
            raise BrokenLaw("drop takes a part of a group; groups are dropped whole.")
        for name, number, least in (("fresh", expansion.fresh, 0), ("rounds", stage.rounds, 1)):
            if type(number) is not int or number < least:
                raise BrokenLaw(f"{name} is {number!r}, expected an int of at least {least}.")
        if expansion.parents is not None and len(expansion.parents.unique()) < len(expansion.parents):
            raise BrokenLaw(f"parents are {expansion.parents.tolist()}, expected different indices.")
        return expansion
    result = getattr(stage, stage._acts_by)(batch, stat, state)
    size, longest = len(batch), int(batch.lengths.max()) if len(batch) else 0
    wide = isinstance(stage, AdvantageEstimator) and isinstance(result, Tensor) and result.ndim == 2
    if wide and result.shape[1] < longest:
        raise BrokenLaw(f"advantages gave {result.shape[1]} columns, and a response has {longest} tokens.")
    _check_tensor(stage._acts_by, result, torch.float64, (size, result.shape[1]) if wide else (size,))
    return result


def _check_tensor(label: str, result: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if not isinstance(result, Tensor):
        raise BrokenLaw(f"{label} gave {result!r}, expected a tensor.")
    if result.requires_grad:
        raise BrokenLaw(f"{label} gave a tensor that requires grad; nothing outside the loss has a gradient.")
    if result.dtype != dtype or tuple(result.shape) != shape:
        raise BrokenLaw(f"{label} gave {result.dtype} of shape {tuple(result.shape)}, expected {dtype} of {shape}.")


# -- ranks as threads --------------------------------------------------------------------------------------------------


class ThreadComm:
    """Collectives between threads: every rank leaves its values, all wait, all read.

    Attributes:
        rank: the rank of this thread.
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
        values_of_ranks = list(left)
        barrier.wait()
        return values_of_ranks


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
