"""Methods whose outcome depends on how an optimizer step was cut, laid out or ordered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.stats import Grouped, Mean, Pool, Settled, Stat
from rlstab.core.terms import Constants, Gate, Terms, Totals


class _Broken(TokenObjective):
    needs = {"entropies"}
    writes = {"weight"}


@dataclass(frozen=True)
class LocalQuantile(_Broken):
    """Its threshold is that of the batch at hand: a micro-batch gives another one."""

    name = "local_quantile"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        entropies = batch.signal("entropies")
        if not len(batch):
            return Terms()
        middle = entropies.median()  # the lower of two middle values, so that doubling the batch changes nothing
        return Terms(weight=(entropies >= middle).to(entropies.dtype))


@dataclass(frozen=True)
class LocalMean(_Broken):
    """It divides by the mean of the batch at hand."""

    name = "local_mean"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        entropies = batch.signal("entropies") + 0.1
        return Terms(weight=entropies / entropies.mean() if len(batch) else None)


@dataclass(frozen=True)
class MeanOfMeans(_Broken):
    """It measures the mean of each part and averages those: a controller that depends on the cut."""

    name = "mean_of_means"

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

    name = "counts_empty_parts"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies") if len(batch) else torch.zeros(1))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms()


@dataclass(frozen=True)
class UnmergedMetric(_Broken):
    """Its metric is the mean of the part, reported as if every part weighed the same."""

    name = "unmerged_metric"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        if not len(batch):
            return Terms()
        return Terms(report={"entropy": Mean.scalar(float(batch.signal("entropies").mean()))})


@dataclass(frozen=True)
class RandomByOrder(_Broken):
    """Its random numbers go to tokens in order."""

    name = "random_by_order"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        rng = torch.Generator().manual_seed(0)
        return Terms(weight=torch.rand(len(batch), generator=rng).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class PlaceByOrder(_Broken):
    """It takes the order in which tokens stand in memory for their place in the response."""

    name = "place_by_order"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        place = torch.zeros_like(batch.logprobs)
        for row in range(batch.num_sequences):
            mine = batch.sequence == row
            place[mine] = torch.arange(int(mine.sum()), dtype=place.dtype)
        return Terms(weight=1 / (1 + place))


@dataclass(frozen=True)
class CountsPadding(_Broken):
    """It divides by the size of the padded tensor."""

    name = "counts_padding"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        rows, width = batch.padded_shape or (1, 1)
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + rows * width)))


@dataclass(frozen=True)
class GateOfOtherTokens(_Broken):
    """Its gate reads the whole sequence and does not say so, so that some of it was never computed."""

    name = "gate_of_other_tokens"
    needs = frozenset()
    writes = {"gates"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def gate(ratio: Tensor, constants: Constants) -> Tensor:
            return batch.spread(batch.sequence_mean(constants.anchor.logprobs)).exp()

        return Terms(gates={"": Gate(gate)})


@dataclass(frozen=True)
class TiesByOrder(_Broken):
    """It takes exactly k tokens, and of those that are equal at the threshold the first in memory."""

    name = "ties_by_order"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Pool.top(batch.signal("entropies"), 0.4)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        entropies, threshold = batch.signal("entropies"), stat.threshold("entropy")
        ranked = entropies.sort(descending=True, stable=True).indices[: threshold.nominal]
        chosen = torch.zeros_like(entropies)
        chosen[ranked] = 1.0
        return Terms(weight=chosen * threshold.reached(entropies))


@dataclass(frozen=True)
class FirstOfTheLargest(_Broken):
    """It spares the token of each response with the largest entropy, by argmax: of equal ones the first in memory."""

    name = "first_of_the_largest"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        entropies = batch.signal("entropies")
        weight = torch.ones_like(entropies)
        for row in range(batch.num_sequences):
            mine = (batch.sequence == row).nonzero().squeeze(-1)
            if len(mine):
                weight[mine[entropies[mine].argmax()]] = 0.0
        return Terms(weight=weight)


@dataclass(frozen=True)
class LocalLargest(_Broken):
    """It scales by the largest value of the batch at hand."""

    name = "local_largest"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        entropies = batch.signal("entropies") + 0.1
        return Terms(weight=entropies / entropies.max() if len(batch) else None)


@dataclass(frozen=True)
class LargestOfNothing(_Broken):
    """It takes the largest value of each part for a metric, and a part may have no token."""

    name = "largest_of_nothing"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        least = batch.signal("entropies").min()
        return Terms(weight=torch.full_like(batch.logprobs, float(torch.where(least < 0, 0.0, 1.0))))


@dataclass(frozen=True)
class WhitensTheBatch(_Broken):
    """It whitens advantages with mean and deviation of the batch at hand, as a trainer with one batch may."""

    name = "whitens_the_batch"
    needs = frozenset()
    writes = {"bonus"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        advantages = batch.advantages
        if not bool(advantages.any()):
            return Terms()
        centred = advantages - advantages.mean()
        return Terms(bonus=(centred / (advantages.std(correction=0) + 1e-4) - advantages) * (advantages != 0))


@dataclass(frozen=True)
class Bessel(_Broken):
    """Its variance divides by n - 1, so two copies of a step are not the step."""

    name = "bessel"

    def measure(self, batch: TokenBatch) -> Stat:
        entropies = batch.signal("entropies").double()
        return {"mean": Mean.of(entropies), "square": Mean.of(entropies.square())}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        count = float(stat.mean("mean").count)
        variance = max(0.0, stat.mean("square").value - stat.mean("mean").value ** 2) if count else 0.0
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + variance * count / max(1.0, count - 1))))


@dataclass(frozen=True)
class ByTheNumberOfTokens(_Broken):
    """It makes up for a long optimizer step by its number of tokens, which the denominator has done already."""

    name = "by_the_number_of_tokens"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, 10.0 / (1.0 + float(stat.mean("entropy").count))))


@dataclass(frozen=True)
class KeptOfThePart(_Broken):
    """It renormalises what it keeps by the share that is kept in the batch at hand."""

    name = "kept_of_the_part"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        kept = (batch.signal("entropies") > 0.5).to(batch.logprobs.dtype)
        return Terms(weight=kept * len(batch) / kept.sum().clamp(min=1))


@dataclass(frozen=True)
class AggregateOfThePart(_Broken):
    """It averages over the tokens of each micro-batch, not over those of the optimizer step."""

    name = "aggregate_of_the_part"
    needs = frozenset()
    writes = {"aggregate"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def mean(sequence: Tensor, counted: Tensor, num_sequences: int, totals: Totals) -> Tensor:
            return torch.full(counted.shape, 1.0 / max(1, int(counted.sum())), dtype=torch.float64)

        return Terms(aggregate=mean)


@dataclass(frozen=True)
class EmptyRowsCount(_Broken):
    """It averages over all rows, those without a token among them: how many there are depends on the host."""

    name = "empty_rows_count"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"length": Mean.of(batch.lengths.double())}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        each = len(batch) / max(1, batch.num_sequences)
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + each)))


@dataclass(frozen=True)
class BaselineOfThePart(_Broken):
    """It compares with the mean of the group in the batch at hand, and groups are torn apart."""

    name = "baseline_of_the_part"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        groups = batch.spread(batch.group_ids)
        mean = Grouped.of(groups, batch.signal("entropies")).mean(groups)
        return Terms(weight=(1 / (1 + mean)).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class GroupsInARow(_Broken):
    """It takes group numbers for places in a list."""

    name = "groups_in_a_row"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        totals = torch.zeros(batch.num_sequences, dtype=torch.float64)
        totals.index_add_(0, batch.group_ids, torch.ones(batch.num_sequences, dtype=torch.float64))
        return Terms(weight=batch.spread(totals[batch.group_ids]).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class NeighbourInMemory(_Broken):
    """It compares each token with the one before it in memory, that of another response at each border."""

    name = "neighbour_in_memory"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        entropies = batch.signal("entropies")
        return Terms(weight=1 / (1 + (entropies - entropies.roll(1)).abs()))


@dataclass(frozen=True)
class SumSoFar(_Broken):
    """Its running sum goes on over the borders of responses."""

    name = "sum_so_far"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=1 / (1 + batch.signal("entropies").cumsum(0)))


@dataclass(frozen=True)
class RandomByRow(_Broken):
    """Its random numbers belong to the place of a response in the batch, not to the response."""

    name = "random_by_row"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        rng = torch.Generator().manual_seed(7)
        drawn = torch.rand(batch.num_sequences, generator=rng, dtype=torch.float64)
        return Terms(weight=batch.spread(drawn).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class RelativeToTheWidth(_Broken):
    """It weighs a token by its place in the padded row."""

    name = "relative_to_the_width"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        width = max(1, batch.padded_shape[1] if batch.padded_shape else 1)
        return Terms(weight=(1 + batch.position / width).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class UnmaskedMean(_Broken):
    """It lays tokens out in rows again and divides by the width of the row, padding included."""

    name = "unmasked_mean"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        if batch.index is None or batch.padded_shape is None:
            return Terms()
        rows = torch.zeros(batch.padded_shape, dtype=torch.float64).view(-1)
        rows[batch.index] = batch.signal("entropies").double()
        mean = rows.view(batch.padded_shape).mean(-1)
        return Terms(weight=(1 + batch.spread(mean)).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class LastPartMeasured(_Broken):
    """It remembers what it measured last on its class: that of the last part, not of the step."""

    name = "last_part_measured"
    last: ClassVar[float] = 0.0

    def measure(self, batch: TokenBatch) -> Stat:
        if len(batch):
            type(self).last = float(batch.signal("entropies").mean())
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + type(self).last)))


@dataclass(frozen=True)
class FirstPartOnly(_Broken):
    """It acts on the part whose terms are asked for first after measuring."""

    name = "first_part_only"
    fresh: ClassVar[bool] = False

    def measure(self, batch: TokenBatch) -> Stat:
        type(self).fresh = True
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        acts, type(self).fresh = type(self).fresh, False
        return Terms(weight=torch.full_like(batch.logprobs, 0.5 if acts else 1.0))


@dataclass(frozen=True)
class DroppedPerPart(_Broken):
    """Its metric is how many tokens it found, counted once for each part: a mean over parts."""

    name = "dropped_per_part"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(report={"forks": Mean.scalar(float((batch.signal("entropies") > 1).sum()))})


@dataclass(frozen=True)
class LearningRateOfThePart(_Broken):
    """Its learning rate is that of the tokens at hand, and every rank has others."""

    name = "learning_rate_of_the_part"
    writes = {"lr_scale"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(lr_scale=1 / (1 + float(batch.signal("entropies").sum())))


@dataclass(frozen=True)
class ShareOfThePart(_Broken):
    """It asks for as many tokens as are a fifth of the part, so that no two parts ask for the same statistic."""

    name = "share_of_the_part"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Pool.largest(batch.signal("entropies"), max(1, len(batch) // 5))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=stat.threshold("entropy").reached(batch.signal("entropies")).to(batch.logprobs.dtype))
