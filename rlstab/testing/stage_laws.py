"""The laws of stages, each a check on three rollouts of a random run that raises ``BrokenLaw`` with its finding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlstab.core.comm import Comm, LocalComm
from rlstab.core.method import Method, State, measure_all
from rlstab.core.stats import Settled
from rlstab.errors import OutOfRange
from rlstab.stages.response_batch import EVIDENCE, ResponseBatch
from rlstab.stages.stage import AdvantageEstimator, Offer, PromptSelector, RewardShaper, RolloutExpander, Stage
from rlstab.testing import tolerances
from rlstab.testing.compare import BrokenLaw, check_state, same_report, same_state
from rlstab.testing.edges import words_of
from rlstab.testing.fresh_process import PickledMethod
from rlstab.testing.laws import (
    LONG,
    Law,
    NotApplicable,
    add_to,
    check_finite,
    check_long_run,
    check_process,
    check_repr,
    dealt,
    other_values,
    untouched,
)
from rlstab.testing.relabel import same_draws
from rlstab.testing.rollouts import Rollout, make_rollout
from rlstab.testing.run import RunOutcome, in_threads, run_chain

#: The laws of stages, in the order of the report.
STAGE_LAWS: list[Law] = []
law = partial(add_to, STAGE_LAWS)

#: The groups in each part of one rank.
Parts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class StageTrial:
    """A trial of a law of stages: three rollouts in a row, and a seed.

    ``pickled`` is the stage for another process, as it was before any law saw it.
    """

    rollouts: Sequence[Rollout]
    seed: int
    pickled: PickledMethod

    def __str__(self) -> str:
        return ", ".join(map(repr, self.rollouts))

    def may_refuse(self, stage: Stage) -> bool:
        """Whether raising ``OutOfRange`` is allowed: unlimited prompts, many prompts, rewards outside of [0, 1]."""
        if isinstance(stage, PromptSelector):  # more than the pool of a small rollout has to hold
            return any(rollout.offer.size is None or rollout.offer.count > 6 for rollout in self.rollouts)
        several = [(rollout.responses.rewards, rollout.responses.evidence("raw_rewards")) for rollout in self.rollouts]
        return any(bool(((rewards < 0) | (rewards > 1)).any()) for pair in several for rewards in pair)

    def run(self, stage: Stage) -> Iterator[tuple[Rollout, State, StageOutcome]]:
        """Each rollout with the state before it and its outcome."""
        state = stage.init_state()
        for rollout in self.rollouts:
            outcome = run_whole(stage, rollout, state)
            yield rollout, state, outcome
            state = outcome.state


# -- running a stage ---------------------------------------------------------------------------------------------------


#: Results of responses, by name and sequence id: ``(1,)``, or a number for each sampled token.
RowsByName: TypeAlias = dict[str, dict[int, Tensor]]


@dataclass
class StageOutcome(RunOutcome):
    """The outcome of a stage in one rollout, on one rank or on all.

    Attributes:
        rows: the results of each response.
        numbers: by name, results that are the same on every rank.
        chosen: the prompts of a selector.
        stat: of the whole rollout.
    """

    rows: RowsByName
    numbers: dict[str, int]
    chosen: Tensor | None
    stat: Settled

    @property
    def given(self) -> list[tuple[str, Tensor]]:
        """The results of each response, with their names."""
        return [(name, row) for name, rows in self.rows.items() for row in rows.values()]


def run_whole(stage: Stage, rollout: Rollout, state: State | None) -> StageOutcome:
    """The rollout in one part; without a state, from the initial one."""
    before = stage.init_state() if state is None else state
    return run_parts(stage, rollout, before, [list(rollout.groups)], LocalComm())


def run_parts(stage: Stage, rollout: Rollout, state: State, parts: Parts, comm: Comm) -> StageOutcome:
    """The rollout in parts, each a list of numbers of groups."""
    chosen = choose(stage, rollout.offer, state)
    batches = [rollout.part(part, chosen) for part in parts]
    stat, after = measure_all(stage, batches, state, comm)
    outcomes = [_outcome(stage, batch, stat, state, rollout.offer) for batch in batches or [stage._empty_part()]]
    return replace(joined(outcomes), chosen=chosen, state=after)


def run_ranks(stage: Stage, rollout: Rollout, state: State, ranks: Sequence[Parts]) -> list[StageOutcome]:
    """The outcome of each rank on its parts, one thread each; a rank may be empty."""
    return in_threads(len(ranks), lambda rank, comm: run_parts(stage, rollout, state, ranks[rank], comm))


def choose(stage: Stage, offer: Offer, state: State) -> Any:
    """The prompts that a selector chooses; None for other stages."""
    if not isinstance(stage, PromptSelector):
        return None
    chosen = stage.select(offer, state)
    _check_tensor("select", chosen, torch.int64, (offer.count,))
    return chosen


def _act(stage: Stage, batch: ResponseBatch, stat: Settled, state: State, offer: Offer) -> Any:
    """The results of a stage, as it returns them."""
    if isinstance(stage, PromptSelector):
        return choose(stage, offer, state)
    if isinstance(stage, RolloutExpander):
        return stage.expand(batch, stat, state, offer.seed)
    return getattr(stage, stage._acts_by)(batch, stat, state)


def _outcome(stage: Stage, batch: ResponseBatch, stat: Settled, state: State, offer: Offer) -> StageOutcome:
    values: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    given = _act(stage, batch, stat, state, offer)
    if isinstance(stage, RolloutExpander):
        none, nothing = torch.zeros(len(batch), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        parents = nothing if given.parents is None else given.parents
        values["drop"] = none if given.drop is None else given.drop
        values["the pivot"] = none.index_add(0, parents, nothing if given.pivots is None else given.pivots)
        numbers = {"fresh": given.fresh, **({"branches": given.branches} if len(parents) else {})}
    elif isinstance(stage, RewardShaper | AdvantageEstimator):
        values["the reward" if isinstance(stage, RewardShaper) else "the advantage"] = given
    ids, lengths = batch.sequence_ids.tolist(), batch.lengths.long().tolist()
    rows = {
        name: {owner: row.reshape(-1)[:length] for owner, row, length in zip(ids, of_all, lengths, strict=True)}
        for name, of_all in values.items()
    }
    return StageOutcome(rows, numbers, None, stat, report=dict(stage.report(batch, stat, state)))


def joined(outcomes: Sequence[StageOutcome]) -> StageOutcome:
    """The outcomes of parts or ranks as that of the rollout.

    Raises:
        BrokenLaw: they disagree about what must be the same everywhere.
    """
    total = replace(outcomes[0], rows={name: {} for name in outcomes[0].rows}, numbers={}, report={})
    for outcome in outcomes:
        for name, rows in outcome.rows.items():
            total.rows[name].update(rows)
        for name, number in outcome.numbers.items():
            if total.numbers.setdefault(name, number) != number:
                raise BrokenLaw(f"'{name}' is {total.numbers[name]} on one part and {number} on another.")
        total.add_report(outcome.report)
    return total


def same(what: str, given: StageOutcome, other: StageOutcome, tolerance: float) -> None:
    """Require that outputs, metrics and state of two runs of a rollout agree.

    Raises:
        BrokenLaw: says what differs.
    """
    same_state(f"{what}: what it asks for", given.numbers, other.numbers, 0.0)
    same_state(f"{what}: the choice", given.chosen, other.chosen, 0.0)
    same_rows(what, given.rows, other.rows, tolerance)
    same_report(what, given.report, other.report, tolerance)
    same_state(f"{what}: the state", given.state, other.state, tolerance)


def same_rows(what: str, some: RowsByName, among: RowsByName, tolerance: float) -> None:
    """Require that some responses have the results that they have among others, within ``tolerance`` of the largest.

    Raises:
        BrokenLaw: says what differs.
    """
    for name, rows in some.items():
        sizes = [float(row.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max()) for row in rows.values()]
        within = tolerance * (1 + max(sizes, default=0.0))
        for response, row in rows.items():
            mine, theirs = torch.broadcast_tensors(row.double(), among[name][response].double())
            if not torch.allclose(mine, theirs, rtol=0.0, atol=within, equal_nan=True):
                raise BrokenLaw(f"{what}: {name} of a response is {mine.tolist()} and {theirs.tolist()}.")


# -- the laws ----------------------------------------------------------------------------------------------------------


@law()
def runs(stage: Stage, trial: StageTrial) -> None:
    """Its results have the shapes and dtypes of its kind."""
    for rollout, state, outcome in trial.run(stage):
        for part in (rollout.whole(outcome.chosen), stage._empty_part()):
            _check_kind(stage, part, _act(stage, part, outcome.stat, state, rollout.offer))


@law(draws="extreme")
def finite(stage: Stage, trial: StageTrial) -> None:
    """Extreme rewards, and rewards that differ by a rounding."""
    for _, _, outcome in trial.run(stage):
        check_finite(outcome, outcome.given)


@law(large=True)
def pure(stage: Stage, trial: StageTrial) -> None:
    """It changes no input, uses nothing that the process shares, and the same call gives the same."""
    for rollout, state, outcome in trial.run(stage):
        batch = rollout.whole(choose(stage, rollout.offer, state))
        named = [(name.removeprefix("extra/"), values) for name, values in batch.tensors().items()]
        with untouched(state, batch, [(f"'{name}' of the responses", values) for name, values in named]):
            replace(stage)  # make it once more
            stat, _ = measure_all(stage, [batch], state, LocalComm())
            _act(stage, batch, stat, state, rollout.offer)
        same("called twice with the same", outcome, run_whole(stage, rollout, state), 0.0)


@law()
def process(stage: Stage, trial: StageTrial) -> None:
    """Another process that has seen nothing of the stage gives the same, whatever was seen here."""
    chain = tuple(reversed(trial.rollouts))  # in an order that other laws do not use
    check_process(stage, trial, partial(run_chain, run=run_whole), chain, same)


@law(large=True)
def split(stage: Stage, trial: StageTrial) -> None:
    """Any split of three rollouts into whole groups, over 1 to 6 parts and 1 to 3 ranks, gives the same."""
    rng = random.Random(trial.seed)
    world = rng.randint(1, 3)
    for number, (rollout, state, whole) in enumerate(trial.run(stage), 1):
        ranks = dealt(rng, rollout.groups, rng.randint(1, 6), world, spared=int(number > 1))
        outcomes = run_ranks(stage, rollout, state, ranks)
        where = f"rollout {number} in {sum(map(len, ranks))} parts over {world} ranks"
        for rank, outcome in enumerate(outcomes):
            ranked = f"{where}, rank 0 and rank {rank}"
            same_state(f"{ranked}: the choice", outcomes[0].chosen, outcome.chosen, 0.0)
            same_state(f"{ranked}: the state", outcomes[0].state, outcome.state, 0.0)
        same(where, whole, joined(outcomes), tolerances.REORDERED)


@law(once=True)
def later_rollouts(stage: Stage, trial: StageTrial) -> None:
    """Thirty rollouts with state: each the same in parts; the state stays of its kind, finite, bounded, untouched."""
    needs = sorted(stage.needs - EVIDENCE.keys())
    rollouts = [
        make_rollout("mixed", (2, 3), number, needs, number=number, size=24, seed=trial.seed) for number in range(LONG)
    ]

    def parts(stage: Stage, rollout: Rollout, state: State) -> StageOutcome:
        return joined(run_ranks(stage, rollout, state, [[[0]], [[1]]]))

    check_long_run(stage, rollouts, Rollout.whole, run_whole, parts, same)


@law(large=True)
def permutation(stage: Stage, trial: StageTrial) -> None:
    """Responses and groups in another order give the same."""
    for rollout, state, outcome in trial.run(stage):
        other = run_whole(stage, rollout.shuffled(trial.seed), state)
        same("in another order of the responses", outcome, other, tolerances.REORDERED)


@law(large=True)
def identity(stage: Stage, trial: StageTrial) -> None:
    """The result of a response depends on it, its group and settled statistics; ids only name it and its draws."""
    measures = any(getattr(type(stage), name) is not getattr(Method, name) for name in ("measure", "measure_again"))
    if isinstance(stage, PromptSelector):
        raise NotApplicable("what it does depends on the numbers of prompts")
    for rollout, state, outcome in trial.run(stage):
        for group in () if measures else rollout.groups:
            alone = run_parts(stage, rollout, state, [[group]], LocalComm())
            same_rows("without other groups and with them", alone.rows, outcome.rows, tolerances.REORDERED)
        relabelled = rollout.relabelled()
        ids = [side.responses.sequence_ids for side in (rollout, relabelled)]
        groups = [side.responses.group_ids for side in (rollout, relabelled)]
        with same_draws(torch.cat([ids[1], groups[1]]), torch.cat([ids[0], groups[0]])):
            other = run_whole(stage, relabelled, state)
        names = dict(zip(ids[0].tolist(), ids[1].tolist(), strict=True))
        under = {name: {names[own]: row for own, row in rows.items()} for name, rows in outcome.rows.items()}
        same_rows("under other ids", under, other.rows, tolerances.REORDERED)


@law()
def even_group(stage: Stage, trial: StageTrial) -> None:
    """If all answers to a prompt earned the same, every advantage is exactly 0."""
    if not isinstance(stage, AdvantageEstimator):
        raise NotApplicable("it estimates no advantages")
    evened = replace(trial, rollouts=tuple(rollout.evened() for rollout in trial.rollouts))
    for rollout, state, outcome in evened.run(stage):
        batch = rollout.whole(outcome.chosen)
        alone = batch.group_sum(torch.ones_like(batch.rewards)) == 1
        given = stage.advantages(batch, outcome.stat, state)[(batch.group % 2 == 0) | alone]
        if bool((given != 0).any()):
            worst = given.reshape(-1).abs().max()
            raise BrokenLaw(f"a group whose rewards are all equal has an advantage of {float(worst):.3g}.")


@law()
def selection(stage: Stage, trial: StageTrial) -> None:
    """A choice is a function of offer and state: as many prompts as asked, all of the task; a refill continues it."""
    if not isinstance(stage, PromptSelector):
        raise NotApplicable("it chooses no prompts")
    for rollout, state, _ in trial.run(stage):
        offer = rollout.offer
        more = replace(offer, count=offer.count + 2)
        refill = replace(offer, first=offer.first + offer.count, drawn=offer.drawn + offer.count, count=2)
        first, at_once, then = (choose(stage, asked, state) for asked in (offer, more, refill))
        for chosen in (at_once, then):
            if bool((chosen < 0).any()) or (offer.size is not None and bool((chosen >= offer.size).any())):
                raise BrokenLaw(f"it chooses {chosen.tolist()}, and the prompts are 0 to {offer.size or 'any'}.")
        together = torch.cat([first, then])
        if not torch.equal(at_once, together):
            raise BrokenLaw(
                f"{more.count} prompts at once are {at_once.tolist()}, {offer.count} and a refill of 2 are "
                f"{together.tolist()}; a refill continues where the first choice ended."
            )


@law()
def declared(stage: Stage, trial: StageTrial) -> None:
    """It reads only the evidence of ``needs``."""
    for rollout, state, outcome in trial.run(stage):
        try:
            bare = run_whole(stage, rollout.only(stage.needs), state)
        except LookupError as error:
            raise BrokenLaw(f"it reads what it does not declare: {error}") from error
        same("without, and with, evidence that it does not declare", bare, outcome, 0.0)


@law(once=True)
def used(stage: Stage, trial: StageTrial) -> None:
    """It reads all evidence that ``needs`` names."""
    unread, state = set(stage.needs) - {"prompt_features"}, stage.init_state()
    kinds = ("mixed", "branches", "graded", "cut off")
    needs = sorted(stage.needs - EVIDENCE.keys())
    for number, kind in enumerate(kinds * 2):
        rollout = make_rollout(kind, (2, 4, 3, 1, 4), number, needs, number=number, size=24, seed=trial.seed)
        outcome = run_whole(stage, rollout, state)
        unread -= {name for name in unread if _depends(stage, rollout, state, outcome, name)}
        state = outcome.state
    unread -= words_of(stage)  # evidence that is used only at other values is at least named
    if unread:
        raise BrokenLaw(f"`needs` names '{min(unread)}', which nothing reads. It is made needlessly: remove it.")


def _depends(stage: Stage, rollout: Rollout, state: State, outcome: StageOutcome, name: str) -> bool:
    """Whether the results of a stage change with evidence; refusing other values counts as reading them."""
    try:
        other = run_whole(stage, rollout.given(name, other_values(name, rollout.responses.extra[name])), state)
        same("with other values", outcome, other, 0.0)
    except (BrokenLaw, OutOfRange):
        return True
    return False


@law()
def padding(stage: Stage, trial: StageTrial) -> None:
    """Values after the end of a response in evidence about tokens change nothing."""
    for rollout, state, outcome in trial.run(stage):
        for fill in (1.0, 1e9):
            same("with other numbers after the end", outcome, run_whole(stage, rollout.padded(fill), state), 0.0)


@law()
def serialises(stage: Stage, trial: StageTrial) -> None:
    """``repr`` gives an equal stage, and a checkpoint gives back the states that were saved."""
    check_repr(stage)
    for _, _, outcome in trial.run(stage):
        check_state(outcome.state, stage.init_state())


# -- what each kind may give -------------------------------------------------------------------------------------------


def _check_kind(stage: Stage, batch: ResponseBatch, given: Any) -> None:
    """Shapes, dtypes and ranges by the kind of the stage."""
    size = len(batch)
    if isinstance(stage, RewardShaper):
        _check_tensor("shape", given, torch.float64, (size,))
    elif isinstance(stage, AdvantageEstimator):
        wide = isinstance(given, Tensor) and given.ndim == 2
        longest = int(batch.lengths.max()) if size else 0
        if wide and given.shape[1] < longest:
            raise BrokenLaw(f"advantages gave {given.shape[1]} columns, and a response has {longest} tokens.")
        _check_tensor("advantages", given, torch.float64, (size, given.shape[1]) if wide else (size,))
    elif isinstance(stage, RolloutExpander):
        given.require(stage.name, batch)
        if given.drop is not None and bool((batch.group_mean(given.drop) % 1 != 0).any()):
            raise BrokenLaw("drop takes a part of a group; groups are dropped whole.")
        for what, number, least in (("fresh", given.fresh, 0), ("rounds", stage.rounds, 1)):
            if type(number) is not int or number < least:
                raise BrokenLaw(f"{what} is {number!r}, expected an int of at least {least}.")
        if given.parents is not None and len(given.parents.unique()) < len(given.parents):
            raise BrokenLaw(f"parents are {given.parents.tolist()}, expected different indices.")


def _check_tensor(what: str, given: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if not isinstance(given, Tensor):
        raise BrokenLaw(f"{what} gave {given!r}, expected a tensor.")
    if given.requires_grad:
        raise BrokenLaw(f"{what} gave a tensor that requires grad; nothing outside the loss has a gradient.")
    if given.dtype != dtype or tuple(given.shape) != shape:
        raise BrokenLaw(f"{what} gave {given.dtype} of shape {tuple(given.shape)}, expected {dtype} of {shape}.")
