"""The data level: an objective as a loss mask and advantages per token, for a host whose loss cannot be changed.

The host keeps its clipped policy loss. Where a composition asks for masks, weights, bonuses, one clip for all tokens
and an average, the gradient is that of the objective's own loss; anything else is refused by name.

The host's loss has to be this one, at the settings of :attr:`DataLevel.loss`, with ``h`` from :class:`HostMean`::

    L = sum_i h_i * mask_i * l_i
    l_i = max(-A_i r_i, -A_i clip(r_i, 1 - low, 1 + high)),   at most -A_i dual_clip where A_i < 0
    r_i = exp(logprob_i - old_logprob_i)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rlstab.config import load_objective
from rlstab.core.batch import TokenBatch, layout_of, to_padded
from rlstab.core.comm import Comm, LocalComm
from rlstab.core.compose import compose
from rlstab.core.loss import Part, counts, token_mean
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import Plan, make_plan
from rlstab.core.stats import Mean, Stat, settle
from rlstab.errors import OutOfRange
from rlstab.hosts import own_bounds, require_data_level

Over = Literal["tokens", "sequences", "nothing"]
Counts = Literal["mask", "response"]

#: A clip that no ratio between 0 and e^20 reaches, for hosts that always clip.
NO_LOW, NO_HIGH = 1.0, 1e9


@dataclass(frozen=True)
class HostMean:
    """How a host averages the losses of an optimizer step, over all its micro-batches and ranks.

    Attributes:
        over: ``tokens``, the mean over tokens; ``sequences``, the mean of each response's mean; ``nothing``, a sum.
        counts: the tokens that its divisors count: those of the ``mask`` that it is given, or all of the ``response``.
    """

    over: Over = "tokens"
    counts: Counts = "mask"

    def __post_init__(self) -> None:
        for name, value, known in (("over", self.over, get_args(Over)), ("counts", self.counts, get_args(Counts))):
            if value not in known:
                raise OutOfRange(f"HostMean: {name} = {value!r}. Write one of: {', '.join(map(repr, known))}.")

    def share(self, batch: TokenBatch, mask: Tensor, tokens: float, sequences: float) -> Tensor:
        """``(n,)`` float64: what each token of the mask weighs in the loss of the host.

        Args:
            batch: some of the sequences of the optimizer step.
            mask: ``(n,)`` bool, the tokens that count.
            tokens: how many count in the optimizer step.
            sequences: how many responses have one that does.
        """
        ones = torch.ones_like(batch.sequence, dtype=torch.float64)
        if self.over == "nothing":
            return ones
        if self.over == "tokens":
            return ones / max(tokens, 1.0)
        return ones / (max(sequences, 1.0) * batch.spread(batch.sequence_total(mask).clamp(min=1.0)))


@dataclass(frozen=True)
class LossSettings:
    """What the policy loss of the host has to be set to: a clip of the token's ratio; its KL and entropy terms are off.

    Attributes:
        low, high: the ratio is held to ``[1 - low, 1 + high]``. Without a trust region they are 1.0 and 1e9, which no
            ratio reaches.
        dual_clip: what the ratio is held to where the advantage is negative; None for none.
        mean: see :class:`HostMean`.
    """

    low: float
    high: float
    dual_clip: float | None
    mean: HostMean


@dataclass(frozen=True, eq=False)
class DataPart:
    """What the host is given instead of its own, for one part of the optimizer step.

    Attributes:
        mask: ``(B, T)`` bool, the loss mask. A response of which nothing is left keeps its tokens here, with an
            advantage of 0, so that no divisor meets an empty one.
        advantages: ``(B, T)``, 0 on what is dropped and outside the mask; in the dtype of the evidence's.
    """

    mask: Tensor
    advantages: Tensor


@dataclass(frozen=True, eq=False)
class DataStep:
    """One optimizer step of this rank.

    Attributes:
        parts: in the order of the batches that it was made from.
        plan: all decisions; its ``state`` is what is carried on.
        report: metrics over all parts and ranks.
        has_no_gradient: nothing has one. A host that steps all the same moves the weights by its momentum.
    """

    parts: Sequence[DataPart]
    plan: Plan
    report: Mapping[str, Mean] = field(repr=False)

    @property
    def has_no_gradient(self) -> bool:
        return self.plan.has_no_gradient

    def metrics(self) -> dict[str, float]:
        """The report as numbers, without metrics that counted nothing."""
        return {name: mean.value for name, mean in self.report.items() if float(mean.count)}


class DataLevel:
    """An objective at the data level::

        level = DataLevel("objective.yaml")
        step = level.step([batch])            # the evidence of one whole optimizer step
        step.parts[0].mask, step.parts[0].advantages

    Args:
        objective: path of a YAML file, what such a file holds, or a method or composition.
        mean: how the host averages. Where the objective averages otherwise, the advantages make up for it.
        state: to go on from; None is the initial one.

    Attributes:
        objective: as a composition.
        loss: what the policy loss of the host has to be set to.
        state: what is carried into the next optimizer step; :func:`rlstab.core.saved_state.dump_state` writes it.

    Raises:
        ConfigError: a method asks for what no mask and no advantages can say; it is named.
    """

    def __init__(
        self,
        objective: str | Path | Mapping[str, Any] | list[Any] | TokenObjective,
        mean: HostMean | None = None,
        *,
        state: State | None = None,
    ) -> None:
        self.objective = compose(objective if isinstance(objective, TokenObjective) else load_objective(objective))
        require_data_level(self.objective)
        bounds = own_bounds(self.objective)
        low, high, dual = (NO_LOW, NO_HIGH, None) if bounds is None else (bounds.low, bounds.high, bounds.dual)
        self.loss = LossSettings(float(low), float(high), dual, HostMean() if mean is None else mean)
        self.state: State = self.objective.init_state() if state is None else state

    def step(self, batches: Sequence[TokenBatch], comm: Comm | None = None) -> DataStep:
        """Decide about one optimizer step, and carry the state on.

        Args:
            batches: what this rank has of the optimizer step, by :meth:`TokenBatch.from_padded`; none on a rank without
                responses. Where log-probs at the start of the optimizer step are not given, the old ones stand for
                them, as with ``refresh: rollout``.
            comm: the ranks that share the optimizer step; all of them call this. None is this process alone.

        Raises:
            NonFinite: NaN or Inf in the evidence, on any rank; every rank raises, and the state stays.
            MissingSignal: a batch lacks a signal that the objective reads.
            ShapeError: a batch was not built from padded tensors.
        """
        comm = LocalComm() if comm is None else comm
        for batch in batches:
            layout_of(batch)  # refuses one that has no (B, T) shape
        plan = make_plan(self.objective, batches, self.state, comm)
        masks = [self._mask(part) for part in plan.parts]
        own = [counts(part.batch, mask).cpu() for part, mask in zip(plan.parts, masks, strict=True)]
        tokens, sequences = comm.sum(torch.stack([torch.zeros(2, dtype=torch.float64), *own]).sum(0)).tolist()
        parts = [self._given(part, mask, plan, tokens, sequences) for part, mask in zip(plan.parts, masks, strict=True)]
        report = _report(self.objective, plan, comm)
        self.state = plan.state
        return DataStep(parts, plan, report)

    def _mask(self, part: Part) -> Tensor:
        """``(n,)`` bool: what is kept, and the whole of a response that lost everything."""
        keep, batch = part.terms.keep, part.batch
        if keep is None or self.loss.mean.counts == "response":
            return torch.ones_like(batch.sequence, dtype=torch.bool)
        return keep | batch.spread(batch.sequence_total(keep) == 0)

    def _given(self, part: Part, mask: Tensor, plan: Plan, tokens: float, sequences: float) -> DataPart:
        """The advantages that make the sum of the host the loss of the objective."""
        batch, terms = part.batch, part.terms
        keep = torch.ones_like(mask) if terms.keep is None else terms.keep
        wanted = torch.zeros_like(batch.sequence, dtype=torch.float64)
        if plan.kept.tokens:
            wanted = (terms.aggregate or token_mean)(batch.sequence, keep, batch.num_sequences, plan.kept)
        pull = part.advantages.double() * (wanted / self.loss.mean.share(batch, mask, tokens, sequences))
        if terms.weight is not None:
            pull = pull * terms.weight.double()
        pull = torch.where(keep, pull, 0.0).to(batch.advantages.dtype)
        return DataPart(to_padded(batch, mask, fill=False), to_padded(batch, pull))


def _report(objective: TokenObjective, plan: Plan, comm: Comm) -> dict[str, Mean]:
    """What the methods report, over parts and ranks; the names are those of a part without tokens."""
    with torch.no_grad():
        empty = objective.terms(objective._empty_part(), plan.settled, plan.state).report
    zero = torch.zeros((), dtype=torch.float64)
    nothing: dict[str, Mean] = {name: Mean(zero, zero) for name in [*empty, "tokens/kept"]}
    reports: list[Stat] = [nothing]
    for part in plan.parts:
        keep = part.kept
        told = {**part.terms.report, "tokens/kept": Mean.of(keep)}
        reports.append({name: told.get(name, zeros) for name, zeros in nothing.items()})
    settled = settle(reports, comm)
    return {name: settled.mean(name) for name in nothing}
