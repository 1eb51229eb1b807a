"""Running a stage over one rollout: whole, in parts, or in parts over several ranks; and when two runs are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlstab.core.comm import Comm, LocalComm
from rlstab.core.method import State, measure_all
from rlstab.core.stats import Mean, Settled
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator, PromptSelector, RewardShaper, RolloutExpander, Stage
from rlstab.testing.agreement import BrokenLaw, near, same_state
from rlstab.testing.outcome import in_threads
from rlstab.testing.rank_processes import Processes
from rlstab.testing.stage_steps import Rollout

#: Groups of the parts of one rank.
Parts = Sequence[Sequence[int]]


@dataclass
class Acted:
    """What a stage gave in one rollout, on one rank or on all.

    Attributes:
        ids: ``(S,)`` sequence ids of the responses, ascending; what is of responses is in their order.
        rows: by name, ``(S,)`` or ``(S, T)``.
        numbers: by name, what is the same on every rank.
        chosen: prompts, of a selector.
        report: merged.
        stat: of the whole rollout.
        state: after the rollout.
    """

    ids: Tensor
    rows: dict[str, Tensor]
    numbers: dict[str, int]
    chosen: Tensor | None
    report: dict[str, Mean]
    stat: Settled
    state: State = field(default_factory=dict)


def run_whole(stage: Stage, rollout: Rollout, state: State) -> Acted:
    """The rollout in one part."""
    return run_parts(stage, rollout, [list(rollout.groups)], state, LocalComm())


def run_parts(stage: Stage, rollout: Rollout, parts: Parts, state: State, comm: Comm) -> Acted:
    """The rollout in parts, each a list of numbers of groups."""
    chosen = select(stage, rollout, state)
    batches = [rollout.part(part, chosen) for part in parts]
    stat, after = measure_all(stage, batches, state, comm)
    found = [_acted(stage, batch, stat, state, rollout.offer.seed) for batch in batches or [stage._empty_part()]]
    for one in found:
        one.chosen, one.state = chosen, after
    return joined(found)


def may_refuse(stage: Stage, rollout: Rollout) -> bool:
    """Whether a stage may raise ``OutOfRange``: over a task without an end, or rewards outside of [0, 1]."""
    if isinstance(stage, PromptSelector):
        return rollout.offer.size is None
    rewards = torch.cat([rollout.responses.rewards, rollout.responses.evidence("raw_rewards")])
    return bool(((rewards < 0) | (rewards > 1)).any())


def select(stage: Stage, rollout: Rollout, state: State) -> Tensor | None:
    """The prompts that a selector chooses; None of other stages."""
    if not isinstance(stage, PromptSelector):
        return None
    chosen = stage.select(rollout.offer, state)
    wanted = rollout.offer.count
    if not isinstance(chosen, Tensor) or chosen.shape != (wanted,) or chosen.dtype != torch.int64:
        what = f"a {chosen.dtype} of shape {tuple(chosen.shape)}" if isinstance(chosen, Tensor) else repr(chosen)
        raise BrokenLaw(f"select gave {what} for {wanted} prompts, expected ({wanted},) int64.")
    return chosen


def run_ranks(
    stage: Stage, rollout: Rollout, ranks: Sequence[Parts], state: State, processes: Processes | None = None
) -> list[Acted]:
    """What each rank found on its parts, in threads or in real processes; a rank may be empty."""
    if processes is None:
        return in_threads(len(ranks), lambda rank, comm: run_parts(stage, rollout, ranks[rank], state, comm))
    jobs = [(stage, rollout, parts, state) for parts in ranks]
    return processes.each(stage, run_parts, jobs, empty=sum(not any(one) for one in ranks), what="a rollout")


def _acted(stage: Stage, batch: ResponseBatch, stat: Settled, state: State, seed: int) -> Acted:
    rows: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    if isinstance(stage, RewardShaper):
        rows["the reward"] = stage.shape(batch, stat, state)
    elif isinstance(stage, AdvantageEstimator):
        rows["the advantage"] = stage.advantages(batch, stat, state)
    elif isinstance(stage, RolloutExpander):
        more = stage.expand(batch, stat, state, seed)
        none, nothing = torch.zeros(len(batch), dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        rows["drop"] = none.bool() if more.drop is None else more.drop
        parents = nothing if more.parents is None else more.parents
        rows["pivot"] = none.index_add(0, parents, nothing if more.pivots is None else more.pivots)
        numbers["fresh"] = more.fresh
        if len(parents):
            numbers["branches"] = more.branches
    order = batch.sequence_ids.argsort()
    sampled = _sampled(batch)
    for name, one in rows.items():
        of_tokens = one.ndim == 2
        rows[name] = torch.where(sampled[:, : one.shape[1]], one, 0.0)[order] if of_tokens else one[order]
    return Acted(batch.sequence_ids[order], rows, numbers, None, dict(stage.report(batch, stat, state)), stat, state)


def _sampled(batch: ResponseBatch) -> Tensor:
    """``(S, limit)`` bool, the places that have a token."""
    return torch.arange(batch.limit) < batch.lengths.unsqueeze(-1)


def joined(found: Sequence[Acted]) -> Acted:
    """What parts or ranks found, as that of the rollout; the state is that of the first.

    Raises:
        BrokenLaw: they say different things about what is the same everywhere.
    """
    first = found[0]
    ids = torch.cat([one.ids for one in found])
    order = ids.argsort()
    numbers: dict[str, int] = {}
    report: dict[str, Mean] = {}
    for one in found:
        for name, number in one.numbers.items():
            if numbers.setdefault(name, number) != number:
                raise BrokenLaw(f"'{name}' is {numbers[name]} on one part and {number} on another.")
        for name, mean in one.report.items():
            report[name] = report[name].merge(mean) if name in report else mean
    rows = {name: _stacked([one.rows[name] for one in found])[order] for name in first.rows}
    return Acted(ids[order], rows, numbers, first.chosen, report, first.stat, first.state)


def _stacked(pieces: Sequence[Tensor]) -> Tensor:
    """Rows of parts that are as wide as their longest response; places without a token hold zeros."""
    if all(one.ndim == 1 for one in pieces):
        return torch.cat(list(pieces))
    width = max(one.shape[1] for one in pieces if one.ndim == 2)
    wide = [one if one.ndim == 2 else one.unsqueeze(-1).expand(-1, width) for one in pieces]
    return torch.cat([torch.nn.functional.pad(one, (0, width - one.shape[1])) for one in wide])


def same(what: str, one: Acted, other: Acted, tolerance: float) -> None:
    """Outputs, metrics and state of two runs of a rollout agree.

    Raises:
        BrokenLaw: says what differs.
    """
    if one.numbers != other.numbers:
        raise BrokenLaw(f"{what}: it gives {one.numbers} and {other.numbers}.")
    if one.chosen is not None and other.chosen is not None and not torch.equal(one.chosen, other.chosen):
        raise BrokenLaw(f"{what}: it chooses {one.chosen.tolist()} and {other.chosen.tolist()}.")
    for name, mine in one.rows.items():
        same_rows(f"{what}: {name}", mine, other.rows[name], tolerance)
    for name in one.report.keys() | other.report.keys():
        if name not in one.report or name not in other.report:
            raise BrokenLaw(f"{what}: the metric '{name}' is there in one of them only.")
        a, b = one.report[name].value, other.report[name].value
        if not (math.isnan(a) and math.isnan(b)):
            near(f"{what}: the metric '{name}'", a, b, tolerance * (1 + abs(a)))
    same_state(what, one.state, other.state, tolerance)


def same_rows(what: str, one: Tensor, other: Tensor, tolerance: float) -> None:
    """Two tensors of responses agree, within ``tolerance`` of the largest number in them; NaN is NaN.

    Raises:
        BrokenLaw: names the response that moves most.
    """
    if one.shape != other.shape:
        raise BrokenLaw(f"{what} has the shape {tuple(one.shape)} and {tuple(other.shape)}.")
    if not one.numel():
        return
    one, other = one.double(), other.double()
    alike = (one == other) | (one.isnan() & other.isnan())
    moved = torch.where(alike, 0.0, (one - other).abs())
    if not bool(moved.max() <= tolerance * (1 + one.nan_to_num(0.0, 0.0, 0.0).abs().max())):
        worst = int(moved.reshape(len(one), -1).amax(-1).nan_to_num(math.inf).argmax())
        raise BrokenLaw(f"{what} of a response is {one[worst].tolist()} and {other[worst].tolist()}.")
