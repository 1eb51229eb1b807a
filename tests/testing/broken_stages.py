"""Deliberately broken stages: each does one thing that published code has done, and the laws beside it must see it.

A law that no broken stage can break would prove nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlstab.core.comm import Comm, LocalComm
from rlstab.core.method import State
from rlstab.core.random import uniform
from rlstab.core.stats import Grouped, Mean, Settled, Stat
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import (
    AdvantageEstimator,
    Expansion,
    Offer,
    PromptSelector,
    RewardShaper,
    RolloutExpander,
    Stage,
)


def _unless_even(responses: ResponseBatch, advantages: Tensor) -> Tensor:
    return torch.where(responses.even, 0.0, advantages)


class LocalBaseline(AdvantageEstimator):
    """Its baseline is the mean of the responses at hand: another part gives another one."""

    name = "local_baseline"

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return _unless_even(responses, responses.rewards - responses.rewards.mean())


class MeanOfMeans(RewardShaper):
    """It measures the mean length of each part and averages those: a price that depends on the cut."""

    name = "mean_of_means"

    def init_state(self) -> State:
        return {"price": 0.0}

    def measure(self, responses: ResponseBatch) -> Stat:
        return {"length": Mean.of(responses.lengths.mean().reshape(1) if len(responses) else responses.lengths)}

    def advance(self, state: State, stat: Settled) -> State:
        length = stat.mean("length")
        return {"price": length.value if float(length.count) else state["price"]}

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return responses.lengths * -float(state["price"])


class CountsEmptyParts(RewardShaper):
    """A part without responses counts as one of length 0: a rank that has nothing would move the mean."""

    name = "counts_empty_parts"

    def measure(self, responses: ResponseBatch) -> Stat:
        return {"length": Mean.of(responses.lengths if len(responses) else torch.zeros(1))}

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        mean = stat.mean("length")
        return responses.lengths - (mean.value if float(mean.count) else 0.0)


class StateOfThisRank(RewardShaper):
    """Its state comes from the responses of this rank alone, so ranks drift apart."""

    name = "state_of_this_rank"

    def init_state(self) -> State:
        return {"responses": 0}

    def measure_all(self, parts: Sequence[ResponseBatch], state: State, comm: Comm) -> tuple[Settled, State]:
        stat, _ = super().settle(parts, state, LocalComm())
        return stat, {"responses": state["responses"] + sum(map(len, parts))}

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return torch.zeros_like(responses.rewards)


class UnmergedMetric(AdvantageEstimator):
    """Its metric is the mean of the part, reported as if every part weighed the same."""

    name = "unmerged_metric"

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return torch.zeros_like(responses.rewards)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        mean = responses.rewards.mean() if len(responses) else torch.zeros(())
        return {"reward": Mean.scalar(float(mean))}


class AsksForItsOwn(RolloutExpander):
    """It asks for as many prompts as it saw fail itself: each rank for another number."""

    name = "asks_for_its_own"

    def expand(self, responses: ResponseBatch, stat: Settled, state: State, seed: int) -> Expansion:
        return Expansion(fresh=int(responses.even[responses.first].sum()))


class DropsByOrder(RolloutExpander):
    """Its random numbers go to groups in the order in which they stand in the batch."""

    name = "drops_by_order"

    def expand(self, responses: ResponseBatch, stat: Settled, state: State, seed: int) -> Expansion:
        rng = torch.Generator().manual_seed(seed)
        order = responses.first.argsort().argsort()
        return Expansion(drop=(torch.rand(responses.groups, generator=rng) < 0.5)[order][responses.group])


class FirstIsTheBaseline(AdvantageEstimator):
    """Its baseline is the answer that happens to stand first."""

    name = "first_is_the_baseline"

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return responses.rewards - responses.rewards[responses.first][responses.group]


class EditsRewards(RewardShaper):
    """It subtracts from the rewards of the caller, in place."""

    name = "edits_rewards"

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        responses.rewards.sub_(0.5 * (~responses.ended).double())
        return torch.zeros_like(responses.rewards)


class EditsItsState(RewardShaper):
    """It counts prompts in the tensor that it was given, so a checkpoint of before has the counts of after."""

    name = "edits_its_state"

    def init_state(self) -> State:
        return {"seen": torch.zeros(24, dtype=torch.float64)}

    def measure(self, responses: ResponseBatch) -> Stat:
        return {"seen": Grouped.of(responses.prompt_ids, torch.ones_like(responses.rewards))}

    def advance(self, state: State, stat: Settled) -> State:
        seen = stat.grouped("seen")
        return {"seen": state["seen"].index_add_(0, seen.keys, seen.totals)}

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return torch.zeros_like(responses.rewards)


class GlobalRandomness(PromptSelector):
    """It draws from the global generator, so whatever is drawn next depends on it."""

    name = "global_randomness"

    def select(self, offer: Offer, state: State) -> Tensor:
        torch.rand(offer.count)
        return offer.drawn + torch.arange(offer.count) if offer.size is None else _wrapped(offer)


def _wrapped(offer: Offer) -> Tensor:
    assert offer.size is not None
    return (offer.drawn + torch.arange(offer.count)) % offer.size


_CALLS = itertools.count()


class ByCallOrder(PromptSelector):
    """It goes on where its last call ended, wherever the run went on."""

    name = "by_call_order"

    def select(self, offer: Offer, state: State) -> Tensor:
        return (next(_CALLS) + torch.arange(offer.count)) % (offer.size or 1000)


class RefillsFromTheStart(PromptSelector):
    """A refill begins where the rollout began, and asks the same prompts again."""

    name = "refills_from_the_start"

    def select(self, offer: Offer, state: State) -> Tensor:
        return (offer.drawn - offer.first + torch.arange(offer.count)) % (offer.size or 1000)


class BeyondTheTask(PromptSelector):
    """It never looks at how many prompts there are."""

    name = "beyond_the_task"

    def select(self, offer: Offer, state: State) -> Tensor:
        return offer.drawn + 30 + torch.arange(offer.count)


class ByPythonsHash(PromptSelector):
    """It shuffles by ``hash`` of a text, which every process seeds anew: only real processes show it."""

    name = "by_pythons_hash"

    def select(self, offer: Offer, state: State) -> Tensor:
        places = range(offer.drawn, offer.drawn + offer.count)
        return torch.tensor([hash(f"{offer.seed}/{one}") % (offer.size or 1000) for one in places])


class FavoursIds(AdvantageEstimator):
    """It leaves out a share of the groups by their ids, which are names and no randomness."""

    name = "favours_ids"

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        kept = (responses.group_ids % 3 != 0).double()
        return _unless_even(responses, kept * (responses.rewards - responses.group_mean(responses.rewards)))


class DividesByTheDeviation(AdvantageEstimator):
    """It divides by the deviation of a group, also where that is 0."""

    name = "divides_by_the_deviation"

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        deviation = responses.rewards - responses.group_mean(responses.rewards)
        return deviation / responses.group_mean(deviation.abs())


class NoBaseline(AdvantageEstimator):
    """A lone answer keeps its reward as its advantage."""

    name = "no_baseline"

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        size = responses.group_sum(torch.ones_like(responses.rewards))
        return torch.where(size == 1, responses.rewards, 0.0)


class HalfPrecision(AdvantageEstimator):
    """It gives float32."""

    name = "half_precision"

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return _unless_even(responses, responses.rewards - responses.group_mean(responses.rewards)).float()


class DropsAPart(RolloutExpander):
    """It drops the cut-off responses of a group and leaves the rest to be compared without them."""

    name = "drops_a_part"

    def expand(self, responses: ResponseBatch, stat: Settled, state: State, seed: int) -> Expansion:
        return Expansion(drop=~responses.ended)


class BranchesAtTheEnd(RolloutExpander):
    """It branches after the last token, where nothing is left to sample."""

    name = "branches_at_the_end"

    def expand(self, responses: ResponseBatch, stat: Settled, state: State, seed: int) -> Expansion:
        parents = (responses.rewards <= 0).nonzero().squeeze(-1)
        tokens = (responses.given + responses.lengths.long())[parents]
        return Expansion(parents=parents, pivots=tokens, branches=2)


class GradientInItsState(RewardShaper):
    """Its state is a parameter, and everything made with it keeps a graph."""

    name = "gradient_in_its_state"

    def init_state(self) -> State:
        return {"scale": torch.ones((), dtype=torch.float64, requires_grad=True)}

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        shaped: Tensor = state["scale"] * responses.lengths
        return shaped


class UndeclaredEvidence(AdvantageEstimator):
    """It weighs by evidence that it does not name, where it happens to be there."""

    name = "undeclared_evidence"

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        weight = responses.extra.get("squared_gradient", responses.lengths)
        return _unless_even(responses, responses.rewards - responses.group_mean(responses.rewards, weight))


class CountsPadding(RewardShaper):
    """It takes the mean over all columns, those after the end of a response included."""

    name = "counts_padding"
    needs = {"entropies"}

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return responses.evidence("entropies").double().sum(-1) / responses.limit


class ForeignState(RewardShaper):
    """Its state holds an object that no checkpoint can hold."""

    name = "foreign_state"

    def init_state(self) -> State:
        return {"window": (1, 2)}

    def shape(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return torch.zeros_like(responses.rewards)


class RandomById(RolloutExpander):
    """Not broken: what the laws ask of randomness."""

    name = "random_by_id"

    def expand(self, responses: ResponseBatch, stat: Settled, state: State, seed: int) -> Expansion:
        return Expansion(drop=uniform(seed + 5, responses.group_ids) < 0.5)


#: Each broken stage with exactly the laws that it breaks, ranks being threads.
BROKEN: Mapping[Stage, frozenset[str]] = {
    LocalBaseline(): frozenset({"split", "identity"}),
    MeanOfMeans(): frozenset({"split"}),
    CountsEmptyParts(): frozenset({"split"}),
    StateOfThisRank(): frozenset({"split"}),
    UnmergedMetric(): frozenset({"split"}),
    AsksForItsOwn(): frozenset({"split"}),
    DropsByOrder(): frozenset({"split", "permutation", "identity"}),
    FirstIsTheBaseline(): frozenset({"permutation"}),
    EditsRewards(): frozenset({"pure"}),
    EditsItsState(): frozenset({"pure"}),
    GlobalRandomness(): frozenset({"pure"}),
    ByCallOrder(): frozenset({"pure", "split", "permutation", "selection", "declared", "padding", "serialises"}),
    RefillsFromTheStart(): frozenset({"selection"}),
    BeyondTheTask(): frozenset({"selection"}),
    ByPythonsHash(): frozenset(),
    FavoursIds(): frozenset({"identity"}),
    DividesByTheDeviation(): frozenset({"finite", "even group"}),
    NoBaseline(): frozenset({"even group"}),
    HalfPrecision(): frozenset({"shapes"}),
    DropsAPart(): frozenset({"shapes"}),
    BranchesAtTheEnd(): frozenset({"shapes"}),
    GradientInItsState(): frozenset({"no gradient"}),
    UndeclaredEvidence(): frozenset({"declared"}),
    CountsPadding(): frozenset({"padding"}),
    ForeignState(): frozenset({"serialises"}),
    RandomById(): frozenset(),
}
