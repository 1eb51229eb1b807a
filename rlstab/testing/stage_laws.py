"""The laws of stages: what each obeys, as checks on a drawn run that raise ``BrokenLaw`` with what they saw."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstab.core.comm import LocalComm
from rlstab.core.method import Method, State, measure_all
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import (
    AdvantageEstimator,
    Offer,
    PromptSelector,
    RewardShaper,
    RolloutExpander,
    Stage,
)
from rlstab.testing import tolerances
from rlstab.testing.agreement import BrokenLaw, same_state
from rlstab.testing.laws import NotHere
from rlstab.testing.rank_processes import Processes
from rlstab.testing.stage_run import Acted, joined, run_parts, run_ranks, run_whole, same, same_rows, select
from rlstab.testing.stage_steps import Rollout


@dataclass(frozen=True)
class StageCase:
    """What a law of stages is checked on: three rollouts in a row, a seed, and processes for ranks or threads."""

    rollouts: tuple[Rollout, Rollout, Rollout]
    seed: int
    processes: Processes | None = None

    def run(self, stage: Stage) -> Iterator[tuple[Rollout, State, Acted]]:
        """Each rollout with the state before it and what the stage gave."""
        state = stage.init_state()
        for rollout in self.rollouts:
            acted = run_whole(stage, rollout, state)
            yield rollout, state, acted
            state = acted.state


@dataclass(frozen=True)
class StageLaw:
    """One law of stages.

    Attributes:
        name: by which an exception is declared: ``exceptions = {"even group": "why"}`` on the class.
        says: one sentence.
        check: raises :class:`BrokenLaw`, or ``NotHere``.
        extreme: it is checked on extreme rewards.
        ranks: it runs a rollout over ranks, which can be real processes.
    """

    name: str
    says: str
    check: Callable[[Stage, StageCase], None]
    extreme: bool = False
    ranks: bool = False


# -- the laws ----------------------------------------------------------------------------------------------------------


def finite(stage: Stage, case: StageCase) -> None:
    """Extreme rewards, and rewards that differ by a rounding."""
    for _, _, acted in case.run(stage):
        found = [(name, one) for name, one in acted.rows.items()]
        found += [(f"the metric '{name}'", one.total / one.count) for name, one in acted.report.items() if one.count]
        found += [(place, torch.as_tensor(one)) for place, one in _leaves(acted.state) if not isinstance(one, str)]
        for what, one in found:
            if not bool(one.isfinite().all()):
                raise BrokenLaw(f"{what} is not finite: {one.tolist()}.")


def pure(stage: Stage, case: StageCase) -> None:
    """No input changes, no global random number is drawn, the same call gives the same."""
    for rollout, state, acted in case.run(stage):
        chosen = select(stage, rollout, state)
        batch = rollout.whole(chosen)
        before, remembered = copy.deepcopy(batch), copy.deepcopy(state)
        generators = _global_randomness()
        stat, _ = measure_all(stage, [batch], state, LocalComm())
        _act(stage, batch, stat, state, rollout.offer)
        for (name, now), (_, then) in zip(batch._tensors(), before._tensors(), strict=True):
            if not torch.equal(now, then):
                raise BrokenLaw(f"it changed '{name}' of the responses in place.")
        try:
            same_state("before and after", remembered, state, 0.0)
        except BrokenLaw as error:
            raise BrokenLaw(
                f"it changed the state that it was given in place ({error}); `advance` returns a new one."
            ) from None
        if _global_randomness() != generators:
            raise BrokenLaw("it drew from a global random number generator; use rlstab.core.random.uniform.")
        same("called twice with the same", acted, run_whole(stage, rollout, state), 0.0)


def no_gradient(stage: Stage, case: StageCase) -> None:
    """Nothing that a stage gives or keeps requires grad."""
    for _, _, acted in case.run(stage):
        chosen = {} if acted.chosen is None else {"the choice": acted.chosen}
        for place, one in [*acted.rows.items(), *chosen.items(), *_leaves(acted.state)]:
            if isinstance(one, Tensor) and one.requires_grad:
                raise BrokenLaw(f"{place} requires grad; nothing outside the loss has a gradient.")


def shapes(stage: Stage, case: StageCase) -> None:
    """Shapes and dtypes of what it gives are those of its kind, and those of its state stay."""
    for rollout, state, acted in case.run(stage):
        batch = rollout.whole(acted.chosen)
        empty = stage._empty_part()
        for part in (batch, empty):
            _check_kind(stage, part, _act(stage, part, acted.stat, state, rollout.offer))
        before, after = dict(_leaves(state)), dict(_leaves(acted.state))
        for place in before.keys() & after.keys():
            one, other = before[place], after[place]
            if isinstance(one, Tensor) != isinstance(other, Tensor):
                raise BrokenLaw(f"{place} was {one!r} and is {other!r}; a tensor stays one.")
            if isinstance(one, Tensor) and (one.dtype, one.ndim) != (other.dtype, other.ndim):
                raise BrokenLaw(
                    f"{place} was {one.dtype} with {one.ndim} dimensions and is {other.dtype} with {other.ndim}."
                )


def split(stage: Stage, case: StageCase) -> None:
    """Any cut into whole groups, over 1 to 6 parts and 1 to 3 ranks, empty ones among them, over three rollouts."""
    rng = random.Random(case.seed)
    world = case.processes.count if case.processes else rng.randint(1, 3)
    for number, (rollout, state, whole) in enumerate(case.run(stage), 1):
        parts: list[list[int]] = [[] for _ in range(rng.randint(1, 6))]
        for group in rollout.groups:
            rng.choice(parts).append(group)
        ranks: list[list[list[int]]] = [[] for _ in range(world)]
        for part in parts:  # in later rollouts one of several ranks has none
            rng.choice(ranks[number > 1 :] or ranks).append(part)
        rng.shuffle(ranks)
        found = run_ranks(stage, rollout, ranks, state, case.processes)
        where = f"rollout {number} in {len(parts)} parts over {world} ranks"
        for rank, one in enumerate(found):
            if one.chosen is not None and not torch.equal(one.chosen, found[0].chosen):  # type: ignore[arg-type]
                raise BrokenLaw(f"{where}: rank 0 and rank {rank} choose different prompts.")
            same_state(f"{where}, rank 0 and rank {rank}: the state", found[0].state, one.state, 0.0)
        try:
            cut = joined(found)
        except BrokenLaw as error:
            raise BrokenLaw(f"{where}: {error}") from None
        same(f"whole, and {where}", whole, cut, tolerances.REORDERED)


def permutation(stage: Stage, case: StageCase) -> None:
    """Responses and groups in another order: the same."""
    for rollout, state, acted in case.run(stage):
        other = run_whole(stage, rollout.shuffled(case.seed), state)
        same("in another order of the responses", acted, other, tolerances.REORDERED)


def identity(stage: Stage, case: StageCase) -> None:
    """What a response gets depends on it, its group and settled statistics; ids only name it."""
    measures = any(getattr(type(stage), one) is not getattr(Method, one) for one in ("measure", "measure_again"))
    random_by_id = isinstance(stage, RolloutExpander | PromptSelector) or hasattr(stage, "seed")
    if isinstance(stage, PromptSelector) or (measures and random_by_id):
        raise NotHere("what it does depends on ids, or on all responses")
    for rollout, state, acted in case.run(stage):
        if not measures:
            for group in rollout.groups:
                alone = run_parts(stage, rollout, [[group]], state, LocalComm())
                here = torch.isin(acted.ids, alone.ids)
                for name, one in alone.rows.items():
                    width = one.shape[1:].numel()
                    among = acted.rows[name][here]
                    among = among[:, :width] if one.ndim == 2 else among
                    same_rows(f"with other groups and without: {name}", among, one, tolerances.REORDERED)
        if not random_by_id:
            other = run_whole(stage, rollout.relabelled(), state)
            for name, one in acted.rows.items():
                order = _order_after_relabelling(acted.ids)
                same_rows(f"under other ids: {name}", one, other.rows[name][order], tolerances.REORDERED)


def even_group(stage: Stage, case: StageCase) -> None:
    """Where all answers to a prompt earned the same, every advantage is exactly 0."""
    if not isinstance(stage, AdvantageEstimator):
        raise NotHere("it estimates no advantages")
    first, second, third = (one.evened() for one in case.rollouts)
    evened = replace(case, rollouts=(first, second, third))
    for rollout, state, acted in evened.run(stage):
        batch = rollout.whole(acted.chosen)
        alone = batch.group_sum(torch.ones_like(batch.rewards)) == 1
        even = (batch.group % 2 == 0) | alone
        given = stage.advantages(batch, acted.stat, state)[even]
        if bool((given != 0).any()):
            worst = given.reshape(-1).abs().max()
            raise BrokenLaw(f"a group whose rewards are all equal has an advantage of {float(worst):.3g}.")


def selection(stage: Stage, case: StageCase) -> None:
    """A choice is a function of offer and state: so many prompts, all there; a refill goes on where it ended."""
    if not isinstance(stage, PromptSelector):
        raise NotHere("it chooses no prompts")
    for rollout, state, acted in case.run(stage):
        offer = rollout.offer
        more = replace(offer, count=offer.count + 2)
        refill = replace(offer, first=offer.first + offer.count, drawn=offer.drawn + offer.count, count=2)
        at_once, then = (select(stage, replace(rollout, offer=one), state) for one in (more, refill))
        assert at_once is not None
        assert then is not None
        assert acted.chosen is not None
        for one in (at_once, then):
            if bool((one < 0).any()) or (offer.size is not None and bool((one >= offer.size).any())):
                raise BrokenLaw(f"it chooses {one.tolist()}, and the prompts are 0 to {offer.size or 'any'}.")
        together = torch.cat([acted.chosen, then])
        if not torch.equal(at_once, together):
            raise BrokenLaw(
                f"{more.count} prompts at once are {at_once.tolist()}, {offer.count} and a refill of 2 are "
                f"{together.tolist()}; a refill goes on where the first choice ended."
            )


def declared(stage: Stage, case: StageCase) -> None:
    """It reads the evidence of ``needs`` and no other."""
    for rollout, state, acted in case.run(stage):
        try:
            bare = run_whole(stage, rollout.only(stage.needs), state)
        except LookupError as error:
            raise BrokenLaw(f"it reads what it does not declare: {error}") from error
        same("without, and with, evidence that it does not declare", bare, acted, 0.0)


def padding(stage: Stage, case: StageCase) -> None:
    """What stands after the end of a response in evidence about tokens changes nothing."""
    for rollout, state, acted in case.run(stage):
        for fill in (1.0, 1e9):
            same("with other numbers after the end", acted, run_whole(stage, rollout.padded(fill), state), 0.0)


def serialises(stage: Stage, case: StageCase) -> None:
    """``repr`` gives an equal stage, the state survives JSON, and the run goes on as it would have."""
    cls = type(stage)
    text = repr(stage).replace(f"{cls.__qualname__}(", f"{cls.__name__}(")
    if eval(text, {cls.__name__: cls}) != stage:
        raise BrokenLaw(f"its repr does not give it back: {stage!r}.")
    first, *later = case.rollouts
    state = run_whole(stage, first, stage.init_state()).state
    for place, one in _leaves(state):
        if not isinstance(one, bool | int | float | str | Tensor) and one is not None:
            raise BrokenLaw(f"{place} is a {type(one).__name__}; a state holds numbers, bools and tensors.")
    back = _from_plain(json.loads(json.dumps(_plain(state))))
    for rollout in later:
        acted, resumed = run_whole(stage, rollout, state), run_whole(stage, rollout, back)
        same("resumed", acted, resumed, 0.0)
        state, back = acted.state, resumed.state


#: The laws of stages, in the order of the report.
STAGE_LAWS: tuple[StageLaw, ...] = (
    StageLaw("finite", "finite on extreme rewards", finite, extreme=True),
    StageLaw("pure", "inputs unchanged, no global randomness, same call same result", pure),
    StageLaw("no gradient", "nothing that it gives or keeps requires grad", no_gradient),
    StageLaw("shapes", "shapes and dtypes of its kind", shapes),
    StageLaw(
        "split", "any cut into whole groups, parts and ranks: same outputs, metrics, next state", split, ranks=True
    ),
    StageLaw("permutation", "any order of responses and groups", permutation),
    StageLaw("identity", "ids only name responses; a group does not know what else is in the batch", identity),
    StageLaw("even group", "equal rewards, no advantage", even_group),
    StageLaw("selection", "a function of offer and state, as many as asked for, refills go on", selection),
    StageLaw("declared", "reads `needs`, and nothing else", declared),
    StageLaw("padding", "numbers after the end of a response do not matter", padding),
    StageLaw("serialises", "repr and state survive, and the run goes on", serialises),
)


# -- helpers -----------------------------------------------------------------------------------------------------------


def _act(stage: Stage, batch: ResponseBatch, stat: Any, state: State, offer: Offer) -> Any:
    """What a stage does, as it is returned; None of one that only measures."""
    if isinstance(stage, PromptSelector):
        return stage.select(offer, state)
    if isinstance(stage, RewardShaper):
        return stage.shape(batch, stat, state)
    if isinstance(stage, AdvantageEstimator):
        return stage.advantages(batch, stat, state)
    if isinstance(stage, RolloutExpander):
        return stage.expand(batch, stat, state, offer.seed)
    return None


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
        if given.drop is not None:
            _check_tensor("drop", given.drop, torch.bool, (size,))
            if bool((batch.group_mean(given.drop) % 1 != 0).any()):
                raise BrokenLaw("drop takes a part of a group; groups are dropped whole.")
        if type(given.fresh) is not int or given.fresh < 0:
            raise BrokenLaw(f"fresh is {given.fresh!r}, expected an int that is not negative.")
        if type(stage.rounds) is not int or stage.rounds < 1:
            raise BrokenLaw(f"rounds is {stage.rounds!r}, expected an int of at least 1.")
        if (given.parents is None) != (given.pivots is None):
            raise BrokenLaw("it gives parents without pivots, or pivots without parents.")
        if given.parents is not None:
            _check_branches(batch, given.parents, given.pivots, given.branches)


def _check_branches(batch: ResponseBatch, parents: Any, pivots: Any, branches: Any) -> None:
    _check_tensor("parents", parents, torch.int64, tuple(parents.shape[:1]))
    _check_tensor("pivots", pivots, torch.int64, tuple(parents.shape))
    if not len(parents):
        return
    if bool((parents < 0).any()) or bool((parents >= len(batch)).any()) or len(parents.unique()) < len(parents):
        raise BrokenLaw(f"parents are {parents.tolist()}, expected different places below {len(batch)}.")
    tokens = (batch.given + batch.lengths.long())[parents]
    if bool((pivots < 1).any()) or bool((pivots >= tokens).any()):
        raise BrokenLaw(f"pivots are {pivots.tolist()} in responses of {tokens.tolist()} tokens: 1 to one less.")
    if type(branches) is not int or branches < 1:
        raise BrokenLaw(f"branches is {branches!r} beside parents, expected an int of at least 1.")


def _check_tensor(what: str, given: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if not isinstance(given, Tensor):
        raise BrokenLaw(f"{what} gave {given!r}, expected a tensor.")
    if given.dtype != dtype or tuple(given.shape) != shape:
        raise BrokenLaw(f"{what} gave {given.dtype} of shape {tuple(given.shape)}, expected {dtype} of {shape}.")


def _global_randomness() -> tuple[Any, ...]:
    """The state of every generator that a whole process shares."""
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state(legacy=False))  # noqa: NPY002


def _order_after_relabelling(ids: Tensor) -> Tensor:
    """Rows come by ascending sequence id, and :meth:`Rollout.relabelled` turns the order of the ids around."""
    return torch.arange(len(ids) - 1, -1, -1)


def _leaves(state: Any, place: str = "state") -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        for key, one in state.items():
            yield from _leaves(one, f"{place}['{key}']")
    else:
        yield place, state


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(one) for key, one in state.items()}
    if isinstance(state, Tensor):
        return {"tensor": state.tolist(), "dtype": str(state.dtype), "shape": list(state.shape)}
    return state


def _from_plain(plain: Any) -> Any:
    if isinstance(plain, dict):
        if plain.keys() == {"tensor", "dtype", "shape"}:
            dtype = getattr(torch, plain["dtype"].removeprefix("torch."))
            return torch.tensor(plain["tensor"], dtype=dtype).reshape(plain["shape"])
        return {key: _from_plain(one) for key, one in plain.items()}
    return plain
