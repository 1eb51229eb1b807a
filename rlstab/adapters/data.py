"""The data level: an objective as a loss mask and advantages per token, for a host whose loss cannot be changed.

The host keeps its clipped policy loss. If a composition asks only for masks, weights, bonuses, one clip for all tokens
and an average, the gradient is that of the objective's loss; anything else is refused by name.

The host's loss has to be this one, at the settings of :attr:`DataLevel.loss`, with ``h`` from :class:`HostMean`::

    L = sum_i h_i * mask_i * l_i
    l_i = max(-A_i r_i, -A_i clip(r_i, 1 - low, 1 + high)),   at most -A_i dual_clip where A_i < 0
    r_i = exp(logprob_i - old_logprob_i)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rlstab.adapters.training import Given, open_objective
from rlstab.core.batch import TokenBatch, layout_of, to_padded
from rlstab.core.comm import Comm, LocalComm
from rlstab.core.denominators import counts
from rlstab.core.loss import Part, token_mean
from rlstab.core.method_settings import check_choices
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import Plan, make_plan
from rlstab.core.stats import Mean, Stat, settle
from rlstab.hosts import adapted, own_bounds

Over = Literal["tokens", "sequences", "nothing"]
Counts = Literal["mask", "response"]

#: Bounds of a clip that no ratio between 0 and e^20 reaches, for hosts that always clip.
NO_LOW, NO_HIGH = 1.0, 1e9


@dataclass(frozen=True)
class HostMean:
    """How a host averages the losses of an optimizer step, over all its micro-batches and ranks.

    Attributes:
        over: ``tokens``, the mean over tokens; ``sequences``, the mean of each response's mean; ``nothing``, a sum.
        counts: the tokens that its divisors count: those of the given ``mask``, or all of the ``response``.
    """

    over: Over = "tokens"
    counts: Counts = "mask"

    def __post_init__(self) -> None:
        check_choices(HostMean.__init__, over=self.over, counts=self.counts)

    def share(self, batch: TokenBatch, mask: Tensor, tokens: float, sequences: float) -> Tensor:
        """``(n,)`` float64: the weight of each token of the mask in the loss of the host.

        Args:
            batch: some of the sequences of the optimizer step.
            mask: ``(n,)`` bool, the tokens that count.
            tokens: number of tokens that count in the optimizer step.
            sequences: number of responses with such a token.
        """
        ones = torch.ones_like(batch.sequence, dtype=torch.float64)
        if self.over == "nothing":
            return ones
        if self.over == "tokens":
            return ones / max(tokens, 1.0)
        return ones / (max(sequences, 1.0) * batch.spread(batch.sequence_total(mask).clamp(min=1.0)))


@dataclass(frozen=True)
class LossSettings:
    """The settings that the policy loss of the host needs: a clip of the token's ratio, without KL and entropy terms.

    Attributes:
        low, high: the ratio is held to ``[1 - low, 1 + high]``. Without a trust region they are 1.0 and 1e9, which no
            ratio reaches.
        dual_clip: upper bound of the ratio if the advantage is negative, or None.
        mean: see :class:`HostMean`.
    """

    low: float
    high: float
    dual_clip: float | None
    mean: HostMean


@dataclass(frozen=True, eq=False)
class DataPart:
    """Mask and advantages for the host to use instead of its own, for one part of the optimizer step.

    Attributes:
        mask: ``(B, T)`` bool, the loss mask. A response that lost all tokens keeps them here, with an advantage of 0,
            so that no divisor sees an empty response.
        advantages: ``(B, T)``, 0 on dropped tokens and outside the mask; in the dtype of the evidence.
    """

    mask: Tensor
    advantages: Tensor


@dataclass(frozen=True, eq=False)
class DataStep:
    """One optimizer step of this rank.

    Attributes:
        parts: the parts in the order of the batches.
        plan: all decisions, and the next ``state``.
        report: metrics over all parts and ranks.
        has_no_gradient: whether no token has a gradient. A host that steps anyway moves the weights by its momentum.
    """

    parts: Sequence[DataPart]
    plan: Plan
    report: Mapping[str, Mean] = field(repr=False)

    @property
    def has_no_gradient(self) -> bool:
        return self.plan.has_no_gradient

    def metrics(self) -> dict[str, float]:
        """The report as numbers, without empty metrics."""
        return {name: mean.value for name, mean in self.report.items() if float(mean.count)}


class DataLevel:
    """An objective at the data level::

        level = DataLevel("objective.yaml")
        step = level.step([batch])            # the evidence of one whole optimizer step
        step.parts[0].mask, step.parts[0].advantages

    Args:
        objective: path of a YAML file, what such a file holds, or a method or composition.
        mean: how the host averages. If the objective averages differently, the advantages make up for it.
        state: the state to continue from; None is the initial one.

    Attributes:
        objective: the composition of all that was given.
        loss: the settings that the policy loss of the host needs.
        state: before the next optimizer step; :func:`rlstab.core.saved_state.dump_state` writes it.

    Raises:
        ConfigError: names a method that neither a mask nor advantages can express.
    """

    def __init__(
        self,
        objective: Given,
        mean: HostMean | None = None,
        *,
        state: State | None = None,
    ) -> None:
        self.objective = open_objective(objective, complete=False)
        adapted("data").require(self.objective)
        bounds = own_bounds(self.objective)
        low, high, dual = (NO_LOW, NO_HIGH, None) if bounds is None else (bounds.low, bounds.high, bounds.dual)
        self.loss = LossSettings(float(low), float(high), dual, HostMean() if mean is None else mean)
        self.state: State = self.objective.init_state() if state is None else state

    def step(self, batches: Sequence[TokenBatch], comm: Comm | None = None) -> DataStep:
        """Decide about one optimizer step, and advance the state.

        Args:
            batches: the part of this rank in the optimizer step, by :meth:`TokenBatch.from_padded`; empty on a rank
                without responses. If log-probs at the start of the optimizer step are not given, the old ones are used,
                as with ``refresh: rollout``.
            comm: the ranks that share the optimizer step, all of which call this; None is only this process.

        Raises:
            NonFinite: there is NaN or Inf in the evidence of any rank; every rank raises, and the state does not
                change.
            MissingSignal: a batch lacks a signal that the objective reads.
            ShapeError: a batch was not built from padded tensors.
        """
        comm = LocalComm() if comm is None else comm
        for batch in batches:
            layout_of(batch)  # refuses a batch without (B, T) shape
        plan = make_plan(self.objective, batches, self.state, comm)
        masks = []
        for part in plan.parts:
            keep, batch = part.terms.keep, part.batch
            if keep is None or self.loss.mean.counts == "response":
                masks.append(torch.ones_like(batch.sequence, dtype=torch.bool))
            else:  # a response that lost all tokens keeps them
                masks.append(keep | batch.spread(batch.sequence_total(keep) == 0))
        counted = [counts(part.batch, mask).cpu() for part, mask in zip(plan.parts, masks, strict=True)]
        tokens, sequences = comm.sum(torch.stack([torch.zeros(2, dtype=torch.float64), *counted]).sum(0)).tolist()
        parts = [self._given(part, mask, plan, tokens, sequences) for part, mask in zip(plan.parts, masks, strict=True)]
        report = _report(self.objective, plan, comm)
        self.state = plan.state
        return DataStep(parts, plan, report)

    def _given(self, part: Part, mask: Tensor, plan: Plan, tokens: float, sequences: float) -> DataPart:
        """The advantages with which the loss of the host is that of the objective."""
        batch, terms = part.batch, part.terms
        keep = torch.ones_like(mask) if terms.keep is None else terms.keep
        weights = torch.zeros_like(batch.sequence, dtype=torch.float64)
        if plan.kept.tokens:
            weights = (terms.aggregate or token_mean)(batch.sequence, keep, batch.num_sequences, plan.kept)
        pull = part.advantages.double() * (weights / self.loss.mean.share(batch, mask, tokens, sequences))
        if terms.weight is not None:
            pull = pull * terms.weight.double()
        pull = torch.where(keep, pull, 0.0).to(batch.advantages.dtype)
        return DataPart(to_padded(batch, mask, fill=False), to_padded(batch, pull))


def _report(objective: TokenObjective, plan: Plan, comm: Comm) -> dict[str, Mean]:
    """The metrics of the methods over parts and ranks, with the names in the report of a part without tokens."""
    with torch.no_grad():
        empty = objective.terms(objective._empty_part(), plan.settled, plan.state).report
    zero = torch.zeros((), dtype=torch.float64)
    zeros_by_name: dict[str, Mean] = {name: Mean(zero, zero) for name in [*empty, "tokens/kept"]}
    reports: list[Stat] = [zeros_by_name]
    for part in plan.parts:
        report = {**part.terms.report, "tokens/kept": Mean.of(part.kept)}
        reports.append({name: report.get(name, zeros) for name, zeros in zeros_by_name.items()})
    settled = settle(reports, comm)
    return {name: settled.mean(name) for name in zeros_by_name}
