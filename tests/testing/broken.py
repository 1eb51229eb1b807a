"""Deliberately broken methods: each does one thing that published code has done, and the laws beside it must see it.

A law that no broken method can break would prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.facts import Limit
from rlstab.core.objective import State, TokenObjective
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean, Settled, Stat
from rlstab.core.terms import Bounds, Gate, Held, Terms


class _Broken(TokenObjective):
    needs = frozenset({"entropies"})
    writes = frozenset({"weight"})


@dataclass(frozen=True)
class LocalQuantile(_Broken):
    """Its threshold is that of the batch at hand: a micro-batch gives another one."""

    name: ClassVar[str] = "local_quantile"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        entropies = batch.signal("entropies")
        if not len(batch):
            return Terms()
        middle = entropies.median()  # the lower of two middle values, so that doubling the batch changes nothing
        return Terms(weight=(entropies >= middle).to(entropies.dtype))


@dataclass(frozen=True)
class LocalMean(_Broken):
    """It divides by the mean of the batch at hand."""

    name: ClassVar[str] = "local_mean"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        entropies = batch.signal("entropies") + 0.1
        return Terms(weight=entropies / entropies.mean() if len(batch) else None)


@dataclass(frozen=True)
class MeanOfMeans(_Broken):
    """It measures the mean of each part and averages those: a controller that depends on the cut."""

    name: ClassVar[str] = "mean_of_means"

    def init_state(self) -> State:
        return {"entropy": 0.0}

    def measure(self, batch: TokenBatch) -> Stat:
        entropies = batch.signal("entropies")
        return {"entropy": Mean.of(entropies.mean().reshape(1) if len(batch) else entropies)}

    def advance(self, state: State, stat: Settled) -> State:
        mean = stat.mean("entropy")
        return {"entropy": mean.value if float(mean.count) else state["entropy"]}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms()


@dataclass(frozen=True)
class CountsEmptyParts(_Broken):
    """A part without tokens counts as one: a rank that has nothing would move the mean."""

    name: ClassVar[str] = "counts_empty_parts"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies") if len(batch) else torch.zeros(1))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms()


@dataclass(frozen=True)
class UnmergedMetric(_Broken):
    """Its metric is the mean of the part, reported as if every part weighed the same."""

    name: ClassVar[str] = "unmerged_metric"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        if not len(batch):
            return Terms()
        return Terms(report={"entropy": Mean.scalar(float(batch.signal("entropies").mean()))})


@dataclass(frozen=True)
class RandomByOrder(_Broken):
    """Its random numbers go to tokens in order."""

    name: ClassVar[str] = "random_by_order"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        rng = torch.Generator().manual_seed(0)
        return Terms(weight=torch.rand(len(batch), generator=rng).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class PlaceByOrder(_Broken):
    """It takes the order in which tokens stand in memory for their place in the response."""

    name: ClassVar[str] = "place_by_order"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        place = torch.zeros_like(batch.logprobs)
        for row in range(batch.num_sequences):
            mine = batch.sequence == row
            place[mine] = torch.arange(int(mine.sum()), dtype=place.dtype)
        return Terms(weight=1 / (1 + place))


@dataclass(frozen=True)
class EditsItsInput(_Broken):
    """It zeroes entries of a tensor that belongs to the caller."""

    name: ClassVar[str] = "edits_its_input"
    needs = frozenset({"sum_p_sq"})

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        batch.signal("sum_p_sq").zero_()
        return Terms()


@dataclass(frozen=True)
class GlobalRandomness(_Broken):
    """It draws from the global generator, so whatever is drawn next depends on it."""

    name: ClassVar[str] = "global_randomness"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=(torch.rand(len(batch)) >= 0).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class CountsPadding(_Broken):
    """It divides by the size of the padded tensor."""

    name: ClassVar[str] = "counts_padding"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        rows, width = batch.padded_shape or (1, 1)
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + rows * width)))


@dataclass(frozen=True)
class ReversedClip(_Broken):
    """Its lower and upper bound are exchanged; its oracle is the clip that it means to be."""

    name: ClassVar[str] = "reversed_clip"
    needs = frozenset()
    writes = frozenset({"bounds"})

    low: float = 0.05
    high: float = 0.6

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(bounds=Bounds(self.high, self.low))


@dataclass(frozen=True)
class GraphInAState(_Broken):
    """Its state is a parameter, and every loss made with it keeps its graph."""

    name: ClassVar[str] = "graph_in_a_state"

    def init_state(self) -> State:
        return {"scale": torch.ones((), requires_grad=True)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms()


@dataclass(frozen=True)
class InnerDetach(_Broken):
    """Half of its ratio is a constant made from the policy itself, which finite differences cannot hold."""

    name: ClassVar[str] = "inner_detach"
    needs = frozenset()
    writes = frozenset({"ratio"})

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def ratio(policy: PolicyOutputs, held: Held) -> Tensor:
            return 0.5 * policy.logprobs + 0.5 * policy.logprobs.detach() - batch.old_logprobs

        return Terms(ratio=ratio)


@dataclass(frozen=True)
class IgnoresTheAdvantage(_Broken):
    """It imitates every token a little, whatever it earned."""

    name: ClassVar[str] = "ignores_the_advantage"
    needs = frozenset()
    writes = frozenset({"bonus"})

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(bonus=torch.full_like(batch.advantages, 0.1))


@dataclass(frozen=True)
class RatioOfDroppedTokens(_Broken):
    """Its ratio is the mean over the sequence, tokens that somebody dropped included."""

    name: ClassVar[str] = "ratio_of_dropped_tokens"
    needs = frozenset()
    writes = frozenset({"ratio"})

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def ratio(policy: PolicyOutputs, held: Held) -> Tensor:
            gap = policy.logprobs - batch.old_logprobs
            return batch.spread(batch.sequence_mean(gap)).to(gap.dtype)

        return Terms(ratio=ratio)


@dataclass(frozen=True)
class GateOfOtherTokens(_Broken):
    """Its gate reads the whole sequence and does not say so, so that some of it was never computed."""

    name: ClassVar[str] = "gate_of_other_tokens"
    needs = frozenset()
    writes = frozenset({"gates"})

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def gate(ratio: Tensor, held: Held) -> Tensor:
            return batch.spread(batch.sequence_mean(held.anchor.logprobs)).exp()

        return Terms(gates={"": Gate(gate)})


@dataclass(frozen=True)
class UndeclaredSignal(_Broken):
    """It uses a signal that it does not name, where it happens to be there."""

    name: ClassVar[str] = "undeclared_signal"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=None if batch.ref_logprobs is None else batch.ref_logprobs.exp())


@dataclass(frozen=True)
class InverseProbability(_Broken):
    """It divides by a probability, which a rare token makes infinite."""

    name: ClassVar[str] = "inverse_probability"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=1e-35 / (batch.logprobs * 10).exp())


@dataclass(frozen=True)
class Cancellation(_Broken):
    """It subtracts two large numbers that differ by little: nothing of it is left in float32."""

    name: ClassVar[str] = "cancellation"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=((1 + batch.signal("entropies") * 1e-8) - 1) * 1e8)


@dataclass(frozen=True)
class UndeclaredPolicy(_Broken):
    """It weighs by the log-prob at the start of the step, and says that it reads none."""

    name: ClassVar[str] = "undeclared_policy"
    reads_policies = frozenset[str]()

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=batch.logprobs.exp())


@dataclass(frozen=True)
class ForeignState(_Broken):
    """Its state holds an object that no checkpoint can hold."""

    name: ClassVar[str] = "foreign_state"

    def init_state(self) -> State:
        return {"seen": (1, 2)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms()


@dataclass(frozen=True)
class FalseLimit(_Broken):
    """It says that a factor of 0 changes nothing, and a factor of 0 takes the gradient of every token."""

    name: ClassVar[str] = "false_limit"
    limits = (Limit({"factor": 0.0}, "it has no effect."),)
    factor: float = 1.0

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, self.factor))


def _clip_oracle(rows: list[list[dict[str, float]]]) -> float:
    total, count = 0.0, 0
    for one in (token for row in rows for token in row):
        ratio = math.exp(max(-20.0, min(20.0, one["live_logprobs"] - one["old_logprobs"])))
        clipped = max(1 - 0.05, min(1 + 0.6, ratio))
        total += max(-one["advantages"] * ratio, -one["advantages"] * clipped)
        count += 1
    return total / count if count else 0.0


#: Each broken method with exactly the laws that it breaks.
BROKEN: Mapping[TokenObjective, frozenset[str]] = {
    LocalQuantile(): frozenset({"split"}),
    LocalMean(): frozenset({"split"}),
    MeanOfMeans(): frozenset({"split"}),
    UnmergedMetric(): frozenset({"split"}),
    CountsEmptyParts(): frozenset({"monoid"}),
    RandomByOrder(): frozenset({"split", "permutation", "replication"}),
    PlaceByOrder(): frozenset({"permutation"}),
    EditsItsInput(): frozenset({"pure"}),
    GlobalRandomness(): frozenset({"pure"}),
    GraphInAState(): frozenset({"detached"}),
    CountsPadding(): frozenset({"packed"}),
    ReversedClip(): frozenset({"oracle"}),
    InnerDetach(): frozenset({"gradcheck"}),
    IgnoresTheAdvantage(): frozenset({"zero advantage"}),
    RatioOfDroppedTokens(): frozenset({"masked"}),
    GateOfOtherTokens(): frozenset({"live rows"}),
    UndeclaredSignal(): frozenset({"declared"}),
    UndeclaredPolicy(): frozenset({"declared"}),
    InverseProbability(): frozenset({"finite"}),
    Cancellation(): frozenset({"precision"}),
    ForeignState(): frozenset({"serialises"}),
    FalseLimit(): frozenset({"limits"}),
}

#: Oracles of those that break the law *oracle*.
ORACLES = {"reversed_clip": _clip_oracle}
