"""Deliberately broken stages: each does one thing that published code has done; the laws named with it must see it."""

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstab.core.comm import LocalComm, carried_out
from rlstab.core.random import uniform
from rlstab.core.stats import Mean
from rlstab.stages.stage import AdvantageEstimator, Expansion, PromptSelector, RewardShaper, RolloutExpander, Stage
from tests.testing.broken_methods import counting, counts_in_place_later, mean_of

#: Each broken stage with the laws that it breaks.
BROKEN: dict[Stage, frozenset[str]] = {}
_ACTS: dict[type[Stage], Any] = {
    AdvantageEstimator: ("advantages", lambda act: lambda self, r, stat, state: act(r, stat, state)),
    RewardShaper: ("shape", lambda act: lambda self, r, stat, state: or_nothing(act(r, stat, state), r)),
    RolloutExpander: ("expand", lambda act: lambda self, r, stat, state, seed: act(r, seed)),
    PromptSelector: ("select", lambda act: lambda self, offer, state: act(offer, state)),
}


def rows(kind: type[Stage], *laws: str, **more: Any) -> Callable[..., None]:
    """Make stages of functions that do what their kind does, by name; ``more`` are members of the class."""

    def add(**acts: Any) -> None:
        for name, act in acts.items():
            acts_by, method = _ACTS[kind]
            body = {"__module__": __name__, "__qualname__": name, "name": name, acts_by: method(act), **more}
            globals()[name] = cls = type(name, (kind,), body)
            BROKEN[cls()] = frozenset(laws)

    return add


def centred(r: Any) -> Tensor:
    """Rewards less the mean of the group; exactly 0 in an even group."""
    return torch.where(r.even, 0.0, r.rewards - r.group_mean(r.rewards))


def local(r: Any) -> Tensor:
    """Rewards less the mean of the responses at hand."""
    return torch.where(r.even, 0.0, r.rewards - r.rewards.mean())


def nothing(r: Any, stat: Any = None, state: Any = None) -> Tensor:
    return torch.zeros_like(r.rewards)


def or_nothing(given: Tensor | None, r: Any) -> Tensor:
    """For what is done for its effect."""
    return nothing(r) if given is None else given


def wrapped(offer: Any, shift: int = 0) -> Tensor:
    return (offer.drawn + shift + torch.arange(offer.count)) % (offer.size or 1000)


def shuffle(seed: int, count: int) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def settle_here(self, parts, state, alone):
    stat, _ = carried_out(Stage._settling(self, parts, state, True), LocalComm())
    yield from ()
    return stat, {"responses": state["responses"] + sum(map(len, parts))}


# Its baseline is the mean of the responses at hand: another part gives another one.
rows(AdvantageEstimator, "split", "identity")(local_baseline=lambda r, stat, state: local(r))
# A part without responses counts as one of length 0: a rank that has nothing would move the mean.
rows(RewardShaper, "split", measure=lambda self, r: {"n": Mean.of(r.lengths if len(r) else torch.zeros(1))})(
    counts_empty_parts=lambda r, stat, state: r.lengths - mean_of(stat, "n")
)
# Its state comes from the responses of this rank alone, so ranks drift apart.
rows(RewardShaper, "split", init_state=lambda self: {"responses": 0}, _settling=settle_here)(state_of_this_rank=nothing)
# It asks for as many prompts as it saw fail itself: each rank for another number.
rows(RolloutExpander, "split")(asks_for_its_own=lambda r, seed: Expansion(fresh=int(r.even[r.first].sum())))


# Its random numbers go to groups in the order in which they stand in the batch.
rows(RolloutExpander, "split", "permutation", "identity")(
    drops_by_order=lambda r, seed: Expansion(drop=(shuffle(seed, r.groups) < 0.5)[r.first.argsort().argsort()][r.group])
)
rows(RewardShaper, "later rollouts", init_state=lambda self: {"n": 0}, advance=counting)(
    local_after_four_rollouts=lambda r, stat, state: (
        r.rewards.mean().expand(len(r)).clone() if state["n"] >= 4 and len(r) else nothing(r)
    )
)


rows(RewardShaper, "pure")(
    caches_on_the_batch=lambda r, stat, state: r.extra.update(cached=r.rewards),
)
rows(RewardShaper, "later rollouts", init_state=lambda self: {"n": 0}, advance=counts_in_place_later)(
    in_place_from_rollout_four=lambda r, stat, state: nothing(r) + 1 / (1 + state["n"])
)
# It draws from the global generator, so whatever is drawn next depends on it.
rows(PromptSelector, "pure")(global_randomness=lambda offer, state: wrapped(offer, int(torch.rand(1) < 0)))

CALLS = itertools.count()

# It continues where its last call ended, wherever the run continued.
rows(PromptSelector, "pure", "split", "permutation", "selection", "declared", "padding", "process")(
    by_call_order=lambda offer, state: (next(CALLS) + torch.arange(offer.count)) % (offer.size or 1000)
)
rows(RewardShaper, "process")(
    sets_the_environment=lambda r, stat, state: os.environ.update(RLSTAB_STAGE="1"),
)


def best_first(r, seed):
    """It branches from the best answers as they stand in memory, as many as there is room for."""
    parents = (r.lengths > 1).logical_and(r.given == 0).nonzero().squeeze(-1)[:1]
    return Expansion(parents=parents, pivots=torch.ones_like(parents), branches=1)


rows(RolloutExpander, "permutation")(branches_from_the_first=best_first)


def by_the_deviation(r, stat, state):
    """It divides by the deviation of a group, also where that is 0."""
    deviation = r.rewards - r.group_mean(r.rewards)
    return deviation / r.group_mean(deviation.abs())


def by_what_is_there(r, stat, state):
    """It weighs by evidence that it does not name, where that happens to be present."""
    return torch.where(r.even, 0.0, r.rewards - r.group_mean(r.rewards, r.extra.get("squared_gradient", r.lengths)))


rows(PromptSelector, "selection")(
    # a refill begins where the rollout began, and asks the same prompts again
    refills_from_the_start=lambda offer, state: wrapped(offer, -offer.first),
)
rows(AdvantageEstimator, "finite", "even group")(divides_by_the_deviation=by_the_deviation)
# A lone answer keeps its reward as its advantage.
rows(AdvantageEstimator, "even group")(
    no_baseline=lambda r, stat, state: torch.where(r.group_sum(torch.ones_like(r.rewards)) == 1, r.rewards, 0.0)
)
rows(AdvantageEstimator, "runs")(half_precision=lambda r, stat, state: centred(r).float())
rows(AdvantageEstimator, "declared")(undeclared_evidence=by_what_is_there)
# It takes the mean over all columns, those after the end of a response included.
rows(RewardShaper, "padding", needs={"entropies"})(
    counts_padding=lambda r, stat, state: r.evidence("entropies").double().sum(-1) / r.limit
)
# Its state holds an object that no checkpoint can hold.
rows(RewardShaper, "serialises", init_state=lambda self: {"window": (1, 2)})(foreign_state=nothing)
# Not broken: what the laws ask of randomness.
rows(RolloutExpander)(random_by_id=lambda r, seed: Expansion(drop=uniform(seed + 5, r.group_ids) < 0.5))


# Ids are more than names: parity, small ones, and such that meet as float32 or int32.
rows(AdvantageEstimator, "identity")(
    even_ids=lambda r, stat, state: centred(r) * (1 + r.sequence_ids % 2),
)
# A state that a checkpoint does not give back, or that grows.
rows(
    RewardShaper,
    "serialises",
    init_state=lambda self: {"mean": 0.0},
    measure=lambda self, r: {"length": Mean.of(r.lengths)},
    advance=lambda self, state, stat: {"mean": np.float64(mean_of(stat, "length"))},
)(numpy_scalar=nothing)
rows(
    RewardShaper,
    "later rollouts",
    init_state=lambda self: {"seen": {}},
    measure=lambda self, r: {"length": Mean.of(r.lengths)},
    advance=lambda self, state, stat: {"seen": {**state["seen"], str(len(state["seen"])): mean_of(stat, "length")}},
)(cache_by_rollout=nothing)
# A needless forward pass.
rows(AdvantageEstimator, "used", needs=frozenset({"entropies", "raw_rewards"}))(
    entropies_for_nothing=lambda r, stat, state: centred(r.reshaped(r.evidence("raw_rewards")))
)
