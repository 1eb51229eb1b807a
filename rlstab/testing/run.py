"""Runs an optimizer step, or a rollout of a stage: whole, in parts, or in parts over several ranks, each a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from rlstab import PolicyOutputs, Settled, State, TokenObjective, make_plan
from rlstab.core.comm import Comm, LocalComm
from rlstab.core.method import Method, measure_all
from rlstab.core.metrics import RunningMeans
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator, Offer, PromptSelector, RewardShaper, RolloutExpander, Stage
from rlstab.testing.agreement import BrokenLaw, same_state
from rlstab.testing.rollouts import Rollout
from rlstab.testing.steps import Step

T = TypeVar("T")
#: Parts of one rank, each a list of numbers of sequences or groups.
Parts: TypeAlias = Sequence[Sequence[int]]


@dataclass
class Outcome:
    """The outcome of one optimizer step or one rollout, on some of its parts or on all.

    Attributes:
        results: tensors by name, ``(n,)`` for the tokens of the optimizer step, or ``(S, T)`` for the responses of the
            rollout, in its order; 0 for those of other parts.
        shared: what is the same on every part and rank, beyond the state.
        loss: summed over parts and ranks; 0 for a stage.
        report: merged over parts.
        state: the state for the next one.
    """

    results: dict[str, Tensor]
    shared: dict[str, Any]
    loss: float = 0.0
    report: RunningMeans = field(default_factory=RunningMeans)
    state: State = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """The sum of magnitudes, to which errors are relative, because a loss may cancel to nothing."""
        finite = [values.double().nan_to_num(0.0, 0.0, 0.0) for values in self.results.values()]
        return 1.0 + abs(self.loss) + sum(float(values.abs().sum()) for values in finite)

    def each(self, change: Callable[[Tensor], Tensor]) -> Outcome:
        """The outcome with changed results."""
        return replace(self, results={name: change(values) for name, values in self.results.items()})

    def require_results(
        self, label: str, other: Outcome, tolerance: float, which: Tensor | slice = slice(None)
    ) -> None:
        """Require that the loss and the results, or those of some tokens or responses, agree with those of another run.

        Raises:
            BrokenLaw: says what differs.
        """
        within = tolerance * max(self.scale, other.scale)
        if not abs(self.loss - other.loss) <= within:
            raise BrokenLaw(f"{label}: the loss is {self.loss!r} and {other.loss!r}.")
        for name, results in self.results.items():
            value, other_value = results[which], other.results[name][which]
            differ = ~torch.isclose(value, other_value, rtol=0.0, atol=within, equal_nan=True)
            if bool(differ.any()):
                raise BrokenLaw(
                    f"{label}: {name} is {float(value[differ][0])!r} and {float(other_value[differ][0])!r}."
                )

    def require_same(self, label: str, other: Outcome, tolerance: float) -> None:
        """Require that results, metrics and state agree with those of another run; a missing metric counted nothing.

        Raises:
            BrokenLaw: says what differs.
        """
        self.require_results(label, other, tolerance)
        same_state(label, self.shared, other.shared, tolerance)
        metrics, other_metrics = (
            {name: mean.value for name, mean in outcome.report.items() if float(mean.count)}
            for outcome in (self, other)
        )
        same_state(f"{label}: the report", metrics, other_metrics, tolerance)
        same_state(f"{label}: the state", self.state, other.state, tolerance)


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcomes of parts or ranks as that of the whole: results and metrics add up, and all have its state.

    Raises:
        BrokenLaw: they disagree about what must be the same everywhere.
    """
    first = outcomes[0]
    results = {name: torch.stack([outcome.results[name] for outcome in outcomes]).sum(0) for name in first.results}
    total = replace(first, results=results, loss=sum(outcome.loss for outcome in outcomes), report=RunningMeans())
    for number, outcome in enumerate(outcomes):
        same_state(f"on part or rank 0 and on {number}:", first.shared, outcome.shared, 0.0)
        same_state(f"on rank 0 and on rank {number}: the state", first.state, outcome.state, 0.0)
        total.report.add(outcome.report)
    return total


# -- running -----------------------------------------------------------------------------------------------------------


def run_whole(method: Method[Any], item: Any, state: State | None = None) -> Outcome:
    """The outcome of an optimizer step, or of a rollout of a stage, in one part."""
    return run_parts(method, item, [item.units], state)


def run_chain(method: Method[Any], chain: Sequence[Any]) -> list[Outcome]:
    """The outcomes of consecutive optimizer steps, or rollouts of a stage, from the initial state."""
    outcomes: list[Outcome] = []
    for item in chain:
        outcomes.append(run_whole(method, item, outcomes[-1].state if outcomes else None))
    return outcomes


def run_parts(
    method: Method[Any], item: Any, parts: Parts, state: State | None = None, comm: Comm | None = None
) -> Outcome:
    """The outcome of an optimizer step, or of a rollout of a stage, in parts; without a state, from the initial one."""
    run: Callable[..., Outcome] = _run_stage if isinstance(method, Stage) else _run_step
    return run(method, item, parts, method.init_state() if state is None else state, comm or LocalComm())


def run_ranks(method: Method[Any], item: Any, ranks: Sequence[Parts], state: State | None = None) -> list[Outcome]:
    """The outcome of each rank on its parts, one thread each; a rank may be empty."""
    return in_threads(len(ranks), lambda rank, comm: run_parts(method, item, ranks[rank], state, comm))


def _run_step(objective: TokenObjective, step: Step, parts: Parts, state: State, comm: Comm) -> Outcome:
    pieces = [step.rows(part) for part in parts]
    batches = [piece.batch() for piece in pieces]
    plan = make_plan(objective, batches, state, comm)
    gradients = {f"the gradient of '{name}'": torch.zeros_like(values) for name, values in step.live.items()}
    outcome = Outcome(gradients, {"lr_scale": plan.lr_scale}, state=plan.state)
    for part, piece, batch in zip(parts, pieces, batches, strict=True):
        tokens, leaves = step.indices(part)[piece.order], piece.leaves()
        out = plan.loss(batch, PolicyOutputs(**leaves))
        out.loss.backward()
        outcome.loss += out.loss.item()
        outcome.report.add(out.report)
        for gradient, leaf in zip(gradients.values(), leaves.values(), strict=True):
            if leaf.grad is not None:
                gradient[tokens] = leaf.grad
    return outcome


def _run_stage(stage: Stage, rollout: Rollout, parts: Parts, state: State, comm: Comm) -> Outcome:
    chosen = choose(stage, rollout.offer, state)
    batches = [rollout.part(part, chosen) for part in parts]
    stat, after = measure_all(stage, batches, state, comm)
    outcomes = []
    # a rank may have no responses
    for part, batch in zip(([], *parts), (stage._empty_part(), *batches), strict=True):
        result = act(stage, batch, stat, state, rollout.offer)
        values: dict[str, Tensor] = {}
        shared: dict[str, Any] = {"the choice": chosen}
        if isinstance(stage, RolloutExpander):
            zeros, no_ids = torch.zeros(len(batch), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
            parents = no_ids if result.parents is None else result.parents
            values["drop"] = zeros if result.drop is None else result.drop
            values["the pivot"] = zeros.index_add(0, parents, no_ids if result.pivots is None else result.pivots)
            values["the number of branches"] = zeros.index_fill(0, parents, result.branches)
            shared["fresh"] = result.fresh
        elif not isinstance(stage, PromptSelector):
            values["the reward" if isinstance(stage, RewardShaper) else "the advantage"] = result
        results = {name: rollout.laid(part, batch.lengths, of_all) for name, of_all in values.items()}
        outcomes.append(Outcome(results, shared, report=RunningMeans(stage.report(batch, stat, state))))
    return replace(joined(outcomes[1:] or outcomes), state=after)


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
