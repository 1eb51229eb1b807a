"""Deliberately broken stages: each does one thing that published code has done, and the laws beside it must see it."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstab.core.comm import LocalComm
from rlstab.core.random import uniform
from rlstab.core.stats import Grouped, Mean
from rlstab.stages.stage import AdvantageEstimator, Expansion, PromptSelector, RewardShaper, RolloutExpander, Stage

#: Each broken stage with the laws that it breaks.
BROKEN: dict[Stage, frozenset[str]] = {}
_ACTS = {
    AdvantageEstimator: ("advantages", lambda act: lambda self, r, stat, state: act(r, stat, state)),
    RewardShaper: ("shape", lambda act: lambda self, r, stat, state: act(r, stat, state)),
    RolloutExpander: ("expand", lambda act: lambda self, r, stat, state, seed: act(r, seed)),
    PromptSelector: ("select", lambda act: lambda self, offer, state: act(offer, state)),
}


def broken(kind: type[Stage], *laws: str, **more: Any) -> Callable[[Any], type[Stage]]:
    """Make a stage of a function that does what its kind does; ``more`` are members of the class."""

    def make(act: Any) -> type[Stage]:
        name, method = _ACTS[kind]
        body = {"__doc__": act.__doc__, "__module__": __name__, "__qualname__": act.__name__, "name": act.__name__}
        cls = dataclass(frozen=True)(type(act.__name__, (kind,), {**body, name: method(act), **more}))
        BROKEN[cls()] = frozenset(laws)
        return cls

    return make


def centred(r: Any) -> Tensor:
    """Rewards less the mean of the group; exactly 0 in an even group."""
    return torch.where(r.even, 0.0, r.rewards - r.group_mean(r.rewards))


def nothing(r: Any) -> Tensor:
    return torch.zeros_like(r.rewards)


def wrapped(offer: Any, shift: int = 0) -> Tensor:
    return (offer.drawn + shift + torch.arange(offer.count)) % (offer.size or 1000)


def mean_of(stat: Any, name: str, empty: float = 0.0) -> float:
    return stat.mean(name).value if float(stat.mean(name).count) else empty


# -- the outcome depends on the cut or the order -----------------------------------------------------------------------


@broken(AdvantageEstimator, "split", "identity")
def local_baseline(r, stat, state):
    """Its baseline is the mean of the responses at hand: another part gives another one."""
    return torch.where(r.even, 0.0, r.rewards - r.rewards.mean())


@broken(
    RewardShaper,
    "split",
    init_state=lambda self: {"price": 0.0},
    measure=lambda self, r: {"length": Mean.of(r.lengths.mean().reshape(1) if len(r) else r.lengths)},
    advance=lambda self, state, stat: {"price": mean_of(stat, "length", state["price"])},
)
def mean_of_means(r, stat, state):
    """It measures the mean length of each part and averages those: a price that depends on the cut."""
    return r.lengths * -float(state["price"])


@broken(RewardShaper, "split", measure=lambda self, r: {"n": Mean.of(r.lengths if len(r) else torch.zeros(1))})
def counts_empty_parts(r, stat, state):
    """A part without responses counts as one of length 0: a rank that has nothing would move the mean."""
    return r.lengths - mean_of(stat, "n")


def settle_here(self, parts, state, comm):
    stat, _ = Stage._settle(self, parts, state, LocalComm())
    return stat, {"responses": state["responses"] + sum(map(len, parts))}


@broken(RewardShaper, "split", init_state=lambda self: {"responses": 0}, _settle=settle_here)
def state_of_this_rank(r, stat, state):
    """Its state comes from the responses of this rank alone, so ranks drift apart."""
    return nothing(r)


def mean_reward(self, r, stat, state):
    return {"reward": Mean.scalar(float(r.rewards.mean()) if len(r) else 0.0)}


@broken(AdvantageEstimator, "split", report=mean_reward)
def unmerged_metric(r, stat, state):
    """Its metric is the mean of the part, reported as if every part weighed the same."""
    return nothing(r)


@broken(RolloutExpander, "split")
def asks_for_its_own(r, seed):
    """It asks for as many prompts as it saw fail itself: each rank for another number."""
    return Expansion(fresh=int(r.even[r.first].sum()))


@broken(RolloutExpander, "split", "permutation", "identity")
def drops_by_order(r, seed):
    """Its random numbers go to groups in the order in which they stand in the batch."""
    drawn = torch.rand(r.groups, generator=torch.Generator().manual_seed(seed))
    return Expansion(drop=(drawn < 0.5)[r.first.argsort().argsort()][r.group])


@broken(AdvantageEstimator, "permutation")
def first_is_the_baseline(r, stat, state):
    """Its baseline is the answer that happens to stand first."""
    return r.rewards - r.rewards[r.first][r.group]


@broken(AdvantageEstimator, "split")
def local_from_twelve_groups(r, stat, state):
    return torch.where(r.even, 0.0, r.rewards - r.rewards.mean()) if r.groups > 12 else centred(r)


@broken(AdvantageEstimator, "identity")
def local_beyond_twelve_tokens(r, stat, state):
    longest = r.lengths.max() if len(r) else 1.0
    return centred(r) * (r.lengths / longest if longest > 12 else 1.0)


@broken(
    RewardShaper,
    "later rollouts",
    init_state=lambda self: {"n": 0},
    advance=lambda self, state, stat: {"n": state["n"] + 1},
)
def local_after_four_rollouts(r, stat, state):
    return r.rewards.mean().expand(len(r)).clone() if state["n"] >= 4 and len(r) else nothing(r)


# -- it writes to what is not its own, or uses what the process shares -------------------------------------------------


@broken(RewardShaper, "pure")
def edits_rewards(r, stat, state):
    """It subtracts from the rewards of the caller, in place."""
    r.rewards.sub_(0.5 * (~r.ended).double())
    return nothing(r)


@broken(RewardShaper, "pure")
def clips_far_below(r, stat, state):
    r.rewards.clamp_(min=-1e6)
    return nothing(r)


def count_prompts(self, state, stat):
    seen = stat.grouped("seen")
    return {"seen": state["seen"].index_add_(0, seen.keys, seen.totals)}


@broken(
    RewardShaper,
    "pure",
    init_state=lambda self: {"seen": torch.zeros(24, dtype=torch.float64)},
    measure=lambda self, r: {"seen": Grouped.of(r.prompt_ids, torch.ones_like(r.rewards))},
    advance=count_prompts,
)
def edits_its_state(r, stat, state):
    """It counts prompts in the tensor that it was given, so a checkpoint of before has the counts of after."""
    return nothing(r)


def counts_in_place(self, state, stat):
    if state["n"] >= 4:
        state["n"] += 1
    return {"n": state["n"] + 1}


@broken(RewardShaper, "later rollouts", init_state=lambda self: {"n": 0}, advance=counts_in_place)
def in_place_from_rollout_four(r, stat, state):
    return nothing(r) + 1 / (1 + state["n"])


@broken(PromptSelector, "pure")
def global_randomness(offer, state):
    """It draws from the global generator, so whatever is drawn next depends on it."""
    torch.rand(offer.count)
    return wrapped(offer)


@broken(RewardShaper, "process")
def sets_the_environment(r, stat, state):
    os.environ["RLSTAB_STAGE"] = "1"
    return nothing(r)


@broken(RewardShaper, "process")
def sets_the_default_dtype(r, stat, state):
    torch.set_default_dtype(torch.float64)
    return nothing(r)


CALLS = itertools.count()
MEMORY: dict[str, float] = {}


@broken(PromptSelector, "pure", "split", "permutation", "selection", "declared", "padding", "serialises", "process")
def by_call_order(offer, state):
    """It goes on where its last call ended, wherever the run went on."""
    return (next(CALLS) + torch.arange(offer.count)) % (offer.size or 1000)


@broken(PromptSelector, "process")
def by_pythons_hash(offer, state):
    """It shuffles by ``hash`` of a text, which every process seeds anew."""
    places = range(offer.drawn, offer.drawn + offer.count)
    return torch.tensor([hash(f"{offer.seed}/{one}") % (offer.size or 1000) for one in places])


def selects_by(name: str, number: Callable[[], int]) -> None:
    def act(offer, state):
        return wrapped(offer, number())

    act.__name__ = name
    globals()[name] = broken(PromptSelector, "process")(act)


selects_by("by_process_id", os.getpid)
selects_by("by_rank", lambda: int(os.environ.get("RANK", "0")))
selects_by("by_the_date", lambda: datetime.date.today().toordinal())


@broken(RewardShaper, "process")
def calibrates_once(r, stat, state):
    """It scales by the mean of the first rewards that it sees, kept in a variable of its module."""
    return r.rewards * MEMORY.setdefault("mean", float(r.rewards.mean()) if len(r) else 0.0)


# -- it breaks what its kind promises ----------------------------------------------------------------------------------


@broken(PromptSelector, "selection")
def refills_from_the_start(offer, state):
    """A refill begins where the rollout began, and asks the same prompts again."""
    return wrapped(offer, -offer.first)


@broken(PromptSelector, "selection")
def beyond_the_task(offer, state):
    """It never looks at how many prompts there are."""
    return offer.drawn + 30 + torch.arange(offer.count)


@broken(AdvantageEstimator, "identity")
def favours_ids(r, stat, state):
    """It leaves out a share of the groups by their ids, which are names and no randomness."""
    return (r.group_ids % 3 != 0).double() * centred(r)


@broken(AdvantageEstimator, "identity")
def parity_of_the_id(r, stat, state):
    return centred(r) * (r.sequence_ids % 2)


@broken(AdvantageEstimator, "finite", "even group")
def divides_by_the_deviation(r, stat, state):
    """It divides by the deviation of a group, also where that is 0."""
    deviation = r.rewards - r.group_mean(r.rewards)
    return deviation / r.group_mean(deviation.abs())


@broken(AdvantageEstimator, "even group")
def no_baseline(r, stat, state):
    """A lone answer keeps its reward as its advantage."""
    return torch.where(r.group_sum(torch.ones_like(r.rewards)) == 1, r.rewards, 0.0)


@broken(AdvantageEstimator, "shapes")
def half_precision(r, stat, state):
    """It gives float32."""
    return centred(r).float()


@broken(RolloutExpander, "shapes")
def drops_a_part(r, seed):
    """It drops the cut-off responses of a group and leaves the rest to be compared without them."""
    return Expansion(drop=~r.ended)


@broken(RolloutExpander, "shapes")
def branches_at_the_end(r, seed):
    """It branches after the last token, where nothing is left to sample."""
    parents = (r.rewards <= 0).nonzero().squeeze(-1)
    return Expansion(parents=parents, pivots=(r.given + r.lengths.long())[parents], branches=2)


@broken(
    RewardShaper,
    "no gradient",
    init_state=lambda self: {"scale": torch.ones((), dtype=torch.float64, requires_grad=True)},
)
def gradient_in_its_state(r, stat, state):
    """Its state is a parameter, and everything made with it keeps a graph."""
    return state["scale"] * r.lengths


@broken(AdvantageEstimator, "declared")
def undeclared_evidence(r, stat, state):
    """It weighs by evidence that it does not name, where it happens to be there."""
    weight = r.extra.get("squared_gradient", r.lengths)
    return torch.where(r.even, 0.0, r.rewards - r.group_mean(r.rewards, weight))


@broken(RewardShaper, "padding", needs={"entropies"})
def counts_padding(r, stat, state):
    """It takes the mean over all columns, those after the end of a response included."""
    return r.evidence("entropies").double().sum(-1) / r.limit


@broken(RewardShaper, "serialises", init_state=lambda self: {"window": (1, 2)})
def foreign_state(r, stat, state):
    """Its state holds an object that no checkpoint can hold."""
    return nothing(r)


@broken(RolloutExpander)
def random_by_id(r, seed):
    """Not broken: what the laws ask of randomness."""
    return Expansion(drop=uniform(seed + 5, r.group_ids) < 0.5)
