"""Methods whose numbers, gradients or meaning are wrong; some say by an oracle what they mean to be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.loss import token_log_ratio
from rlstab.core.metadata import NoOpAt
from rlstab.core.objective import State, TokenObjective
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Grouped, Mean, Pool, Settled, Stat
from rlstab.core.terms import Bounds, Constants, Gate, Penalty, Surrogate, Terms


class _Broken(TokenObjective):
    needs = {"entropies"}
    writes = {"weight"}


@dataclass(frozen=True)
class ReversedClip(_Broken):
    """Its lower and upper bound are exchanged; its oracle is the clip that it means to be."""

    name = "reversed_clip"
    needs = frozenset()
    writes = {"bounds"}

    low: float = 0.05
    high: float = 0.6

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(bounds=Bounds(self.high, self.low))


@dataclass(frozen=True)
class GraphInAState(_Broken):
    """Its state is a parameter, and every loss made with it keeps its graph."""

    name = "graph_in_a_state"

    def init_state(self) -> State:
        return {"scale": torch.ones((), requires_grad=True)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms()


@dataclass(frozen=True)
class InnerDetach(_Broken):
    """Half of its ratio is a constant made from the policy itself, which finite differences cannot hold."""

    name = "inner_detach"
    needs = frozenset()
    writes = {"ratio"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def ratio(policy: PolicyOutputs, constants: Constants) -> Tensor:
            return 0.5 * policy.logprobs + 0.5 * policy.logprobs.detach() - batch.old_logprobs

        return Terms(ratio=ratio)


@dataclass(frozen=True)
class IgnoresTheAdvantage(_Broken):
    """It imitates every token a little, whatever it earned."""

    name = "ignores_the_advantage"
    needs = frozenset()
    writes = {"bonus"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(bonus=torch.full_like(batch.advantages, 0.07))


@dataclass(frozen=True)
class RatioOfDroppedTokens(_Broken):
    """Its ratio is the mean over the sequence, tokens that somebody dropped included."""

    name = "ratio_of_dropped_tokens"
    needs = frozenset()
    writes = {"ratio"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def ratio(policy: PolicyOutputs, constants: Constants) -> Tensor:
            gap = policy.logprobs - batch.old_logprobs
            return batch.spread(batch.sequence_mean(gap)).to(gap.dtype)

        return Terms(ratio=ratio)


@dataclass(frozen=True)
class InverseProbability(_Broken):
    """It divides by a probability, which a rare token makes infinite."""

    name = "inverse_probability"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=1e-35 / (batch.logprobs * 10).exp())


@dataclass(frozen=True)
class Cancellation(_Broken):
    """It subtracts two large numbers that differ by little: nothing of it is left in float32."""

    name = "cancellation"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=((1 + batch.signal("entropies") * 1e-8) - 1) * 1e8)


@dataclass(frozen=True)
class FalseLimit(_Broken):
    """It says that a factor of 0 changes nothing, and a factor of 0 takes the gradient of every token."""

    name = "false_limit"
    limits = (NoOpAt({"factor": 0.0}, "it has no effect."),)
    factor: float = 1.0

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, self.factor))


@dataclass(frozen=True)
class HalfThreshold(_Broken):
    """It compares in half precision, where entropies that differ by a thousandth are one."""

    name = "half_threshold"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Pool.top(batch.signal("entropies"), 0.3)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        value = stat.threshold("entropy").value
        chosen = batch.signal("entropies").half() >= torch.tensor(math.inf if value is None else value).half()
        return Terms(weight=chosen.to(batch.logprobs.dtype))


@dataclass(frozen=True)
class BrainFloat(_Broken):
    """Its weights go through bfloat16, as under autocast."""

    name = "brain_float"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=(1 + batch.signal("entropies")).bfloat16().to(batch.logprobs.dtype))


@dataclass(frozen=True)
class TorchQuantile(_Broken):
    """It takes a quantile over responses by torch, which refuses more than 2^24 of them."""

    name = "torch_quantile"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"response": Grouped.of(batch.spread(batch.sequence_ids), batch.signal("entropies"))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        means = stat.grouped("response")
        if not means.keys.numel():
            return Terms()
        middle = torch.quantile(means.totals / means.counts, 0.5, interpolation="lower")
        return Terms(weight=(means.mean(batch.spread(batch.sequence_ids)) >= middle).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class StrictShare(_Broken):
    """It means the top share with the threshold, and takes what is above it; the oracle knows."""

    name = "strict_share"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Pool.top(batch.signal("entropies"), 0.3)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        value = stat.threshold("entropy").value
        above = batch.signal("entropies") > (math.inf if value is None else value)
        return Terms(weight=above.to(batch.logprobs.dtype))


@dataclass(frozen=True)
class StrictSetting(_Broken):
    """It means entropies of at least ``level``, and takes those above it; the oracle knows."""

    name = "strict_setting"
    level: float = 0.7

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=(batch.signal("entropies") > self.level).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class StrictLiteral(_Broken):
    """It means probabilities of at least a fifth, and takes those above; the oracle knows."""

    name = "strict_literal"
    needs = frozenset()

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=(batch.logprobs.exp() > 0.2).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class OpenTrustRegion(_Broken):
    """It means ratios up to 1.3 inside, and stops those of exactly 1.3; the oracle knows."""

    name = "open_trust_region"
    needs = frozenset()
    writes = {"gates"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(gates={"": Gate(lambda ratio, constants: (ratio < 1.3).to(ratio.dtype))})


@dataclass(frozen=True)
class ZeroIsRewarded(_Broken):
    """It means tokens that were rewarded, and takes those without an advantage too: its metric tells; the oracle knows
    of the bonus."""

    name = "zero_is_rewarded"
    needs = {"ref_logprobs"}
    writes = {"penalties"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        where = batch.advantages >= 0
        return Terms(penalties={"": Penalty(0.5, lambda policy, anchor: -policy.logprobs, where=where)})


@dataclass(frozen=True)
class SignOfThePunished(_Broken):
    """Its bonus is meant to raise what surprised, for either sign, and follows the advantage; the oracle knows."""

    name = "sign_of_the_punished"
    needs = frozenset()
    writes = {"bonus"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(bonus=0.1 * batch.advantages)


@dataclass(frozen=True)
class ForgetsTheMinimum(_Broken):
    """It clips the ratio whatever the sign: a punished token above the clip stops pulling; the oracle knows."""

    name = "forgets_the_minimum"
    needs = frozenset()
    writes = {"surrogate"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(surrogate=Surrogate(lambda ratio, constants: ratio.clamp(0.8, 1.2)))


@dataclass(frozen=True)
class WrongAboveThree(_Broken):
    """Its own ratio has half of its gradient where it is above 3."""

    name = "wrong_above_three"
    needs = frozenset()
    writes = {"ratio"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def ratio(policy: PolicyOutputs, constants: Constants) -> Tensor:
            gap = token_log_ratio(policy, constants.anchor, batch)
            return torch.where(gap > math.log(3.0), 0.5 * gap + 0.5 * gap.detach(), gap)

        return Terms(ratio=ratio)


@dataclass(frozen=True)
class WrongFarBelow(_Broken):
    """Its penalty has no gradient on tokens that became a hundred times rarer."""

    name = "wrong_far_below"
    needs = frozenset()
    writes = {"penalties"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def squared(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            gap = policy.logprobs - batch.logprobs
            return 0.5 * torch.where(gap < -4.6, gap.detach(), gap).square()

        return Terms(penalties={"": Penalty(0.1, squared)})


@dataclass(frozen=True)
class StillAtOne(_Broken):
    """Its ratio has no gradient where it is exactly 1: in the first optimizer step after a rollout, on every token."""

    name = "still_at_one"
    needs = frozenset()
    writes = {"ratio"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def ratio(policy: PolicyOutputs, constants: Constants) -> Tensor:
            gap = token_log_ratio(policy, constants.anchor, batch)
            return gap.sign().detach() * gap.abs()

        return Terms(ratio=ratio)


@dataclass(frozen=True)
class HalfDetachedKL(_Broken):
    """Its k3 holds the ratio constant, so that the penalty pulls and never lets go."""

    name = "half_detached_kl"
    needs = {"ref_logprobs"}
    writes = {"penalties"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def k3(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            gap = batch.signal("ref_logprobs") - policy.logprobs
            return gap.detach().clamp(max=8.0).exp() - gap - 1

        return Terms(penalties={"": Penalty(0.1, k3)})


@dataclass(frozen=True)
class DecidesOnTheLivePolicy(_Broken):
    """It penalises tokens that became rarer than they were, as the live policy has it at that moment."""

    name = "decides_on_the_live_policy"
    needs = frozenset()
    writes = {"penalties"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def rarer(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            return torch.where(policy.logprobs < batch.logprobs, -policy.logprobs, 0.0 * policy.logprobs)

        return Terms(penalties={"": Penalty(0.1, rarer)})


@dataclass(frozen=True)
class OldInItsRatio(_Broken):
    """Its ratio divides by the old policy also where the batch says that the live one is its own denominator."""

    name = "old_in_its_ratio"
    needs = frozenset()
    writes = {"ratio"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(ratio=lambda policy, held: policy.logprobs - batch.old_logprobs)


@dataclass(frozen=True)
class UnclampedExp(_Broken):
    """It takes the exponential of a log-ratio as it is, and float32 ends at e^88."""

    name = "unclamped_exp"
    needs = frozenset()
    writes = {"gates"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def gate(ratio: Tensor, constants: Constants) -> Tensor:
            return 1 + 1e-9 * (batch.logprobs - constants.anchor.logprobs).square().exp()

        return Terms(gates={"": Gate(gate)})


@dataclass(frozen=True)
class SumOfExponentials(_Broken):
    """Its log of a sum of exponentials does not take the largest out first."""

    name = "sum_of_exponentials"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of((8 * batch.signal("entropies")).exp())}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        mean = stat.mean("entropy")
        soft = math.log(mean.value) / 8 if float(mean.count) else 1.0
        return Terms(weight=torch.full_like(batch.logprobs, 1.0), report={"softest": Mean.scalar(soft)})


@dataclass(frozen=True)
class MeanOfNothing(_Broken):
    """It divides by the mean over rewarded tokens, and there may be none."""

    name = "mean_of_nothing"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies"), batch.advantages > 0)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, 1.0 + stat.mean("entropy").value))


@dataclass(frozen=True)
class RestOfTheMass(_Broken):
    """It divides by what a token leaves to others, which is nothing where the policy is certain."""

    name = "rest_of_the_mass"
    needs = frozenset()

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=1e-3 / (1 - batch.logprobs.exp()))


@dataclass(frozen=True)
class DeviationOfOne(_Broken):
    """It reports a deviation that divides by n - 1 also where there is one token."""

    name = "deviation_of_one"
    writes = frozenset()

    def measure(self, batch: TokenBatch) -> Stat:
        entropies = batch.signal("entropies").double()
        return {"mean": Mean.of(entropies), "square": Mean.of(entropies.square())}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        mean, square = stat.mean("mean"), stat.mean("square")
        variance = (square.total - mean.total**2 / mean.count) / (mean.count - 1)
        return Terms(report={"variance": Mean(variance, torch.ones((), dtype=torch.float64))})


@dataclass(frozen=True)
class UndeclaredLiveRead(_Broken):
    """Its penalty reads live entropies and does not say so, and they may not be there."""

    name = "undeclared_live_read"
    needs = frozenset()
    writes = {"penalties"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def bonus(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            return -policy.signal("entropies")

        return Terms(penalties={"": Penalty(0.1, bonus)})


@dataclass(frozen=True)
class ConstantPush(_Broken):
    """It pushes every token up by a little, by a bonus that does not ask what the token earned."""

    name = "constant_push"
    writes = {"bonus"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(bonus=0.01 * batch.signal("entropies"))


@dataclass(frozen=True)
class StrictTopShare(_Broken):
    """It says that a share of 1 keeps everything, and drops the last token, which is on the threshold."""

    name = "strict_top_share"
    writes = {"keep"}
    limits = (NoOpAt({"share": 1.0}, "all tokens reach the smallest entropy."),)
    share: float = 0.5

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Pool.top(batch.signal("entropies"), self.share)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        value = stat.threshold("entropy").value
        return Terms(keep=batch.signal("entropies") > (-math.inf if value is None else value))


@dataclass(frozen=True)
class WrongShape(_Broken):
    """It gives a weight for each response, not for each token."""

    name = "wrong_shape"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.ones(batch.num_sequences + 1))


# -- what some of them mean to be --------------------------------------------------------------------------------------

Rows = list[list[dict[str, float]]]


def _loss(rows: Rows, of: Callable[[dict[str, float], float], float]) -> float:
    """The mean over tokens of a function of the token and its ratio."""
    tokens = [token for row in rows for token in row]
    shifts = [max(-20.0, min(20.0, one["live_logprobs"] - one["old_logprobs"])) for one in tokens]
    return sum(of(one, math.exp(shift)) for one, shift in zip(tokens, shifts, strict=True)) / max(1, len(tokens))


def _weighted(rows: Rows, weight: Callable[[dict[str, float]], float]) -> float:
    return _loss(rows, lambda one, ratio: -one["advantages"] * ratio * weight(one))


def clip(rows: Rows) -> float:
    """The clip that :class:`ReversedClip` means to be."""

    def of(one: dict[str, float], ratio: float) -> float:
        return max(-one["advantages"] * ratio, -one["advantages"] * max(1 - 0.05, min(1 + 0.6, ratio)))

    return _loss(rows, of)


def top_share(rows: Rows) -> float:
    """Three tenths of the tokens, and those that tie with the last of them."""
    ranked = sorted((one["entropies"] for row in rows for one in row), reverse=True)
    least = ranked[math.ceil(0.3 * len(ranked) - 1e-9) - 1] if ranked else 0.0
    return _weighted(rows, lambda one: float(one["entropies"] >= least))


def at_least_a_level(rows: Rows) -> float:
    """Entropies of at least 0.7."""
    return _weighted(rows, lambda one: float(one["entropies"] >= 0.7))


def at_least_a_fifth(rows: Rows) -> float:
    """Probabilities of at least 0.2."""
    return _weighted(rows, lambda one: float(math.exp(one["logprobs"]) >= 0.2))


def up_to_a_bound(rows: Rows) -> float:
    """Ratios of at most 1.3 pull."""
    return _loss(rows, lambda one, ratio: -one["advantages"] * ratio * (ratio <= 1.3))


def rewarded_only(rows: Rows) -> float:
    """Half the log-prob of rewarded tokens, on top of the plain loss."""
    return _loss(
        rows, lambda one, ratio: -one["advantages"] * ratio - 0.5 * (one["advantages"] > 0) * one["live_logprobs"]
    )


def raised_by_size(rows: Rows) -> float:
    """A tenth of the size of the advantage on top of it."""
    return _loss(rows, lambda one, ratio: -(one["advantages"] + 0.1 * abs(one["advantages"])) * ratio)


def pessimist(rows: Rows) -> float:
    """A ratio that is held at 0.8 for punished tokens and at 1.2 for rewarded ones, and free beyond."""

    def of(one: dict[str, float], ratio: float) -> float:
        return -one["advantages"] * (min(ratio, 1.2) if one["advantages"] > 0 else max(ratio, 0.8))

    return _loss(rows, of)
