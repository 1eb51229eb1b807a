"""The micro-batches of one optimizer step, planned together and settled at its end, and means over many of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.objective import TokenObjective
from rlstab.core.plan import Plan
from rlstab.core.stats import Mean


@dataclass(eq=False)
class Window:
    """One optimizer step of this rank.

    Attributes:
        plan: None until the evidence is there, or where it was refused.
        batches: the evidence that the plan was made from.
        refusal: why it was refused, before or after the backward passes.
        unscored: log-probs that the sampler could not give.
        place: the micro-batch whose turn it is.
        loss: of the micro-batches so far.
        nonfinite: live values that are NaN or Inf so far.
        reports: metrics of the micro-batches so far.
    """

    plan: Plan | None = None
    batches: Sequence[TokenBatch] = ()
    refusal: str | None = None
    unscored: list[Tensor] = field(default_factory=list)
    place: int = 0
    loss: Tensor | None = None
    nonfinite: Tensor | None = None
    reports: list[Mapping[str, Mean]] = field(default_factory=list)

    def add(self, loss: Tensor, nonfinite: Tensor, report: Mapping[str, Mean]) -> None:
        """Note what a micro-batch gave; nothing is waited for."""
        self.place += 1
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        self.nonfinite = nonfinite if self.nonfinite is None else self.nonfinite + nonfinite
        self.reports.append(report)

    def tally(self) -> Tensor:
        """``(2,)`` float64: live values that are not finite, and the loss of this rank."""
        if self.loss is None or self.nonfinite is None:
            return torch.zeros(2, dtype=torch.float64)
        return torch.stack([self.nonfinite.double(), self.loss.double()])

    def counted(self, objective: TokenObjective) -> dict[str, Mean]:
        """What is told of the step as a whole; of a refused one, which may hold NaN, that it was."""
        found = {"steps/refused": Mean.scalar(float(self.refusal is not None))}
        plan = self.plan
        if plan is None or self.refusal is not None:
            return found
        found |= {
            "steps/skipped": Mean.scalar(float(plan.has_no_gradient)),
            "lr_scale": Mean.scalar(plan.lr_scale),
            "tokens/live": Mean(*map(_number, (plan.live_tokens, plan.everything.tokens))),
        }
        if "rollout_logprobs" in objective.needs:
            lost = torch.stack([one.double() for one in self.unscored]).sum()
            found["sampler/unscored"] = Mean(lost, _number(sum(len(batch) for batch in self.batches)))
        return found

    def reports_of_step(self) -> Sequence[Mapping[str, Mean]]:
        """Of its micro-batches, unless it was refused."""
        return [] if self.plan is None or self.refusal is not None else self.reports


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


#: By name, a sum and a count.
Sums: TypeAlias = dict[str, tuple[float, float]]


class Tallies:
    """Means over micro-batches, optimizer steps and ranks: a sum and a count each, left on the device until asked.

    Args:
        gather: the sums of every rank, from those of this one.
    """

    def __init__(self, gather: Callable[[Sums], Sequence[Sums]]) -> None:
        self.gather = gather
        self.means: dict[str, Mean] = {}

    def add(self, report: Mapping[str, Mean]) -> None:
        """Merge a report."""
        for name, one in report.items():
            self.means[name] = self.means[name].merge(one) if name in self.means else one

    def collect(self) -> dict[str, float]:
        """The means over all ranks, without what nothing was counted for; then everything begins anew.

        Every rank calls it.
        """
        own = {name: (float(one.total), float(one.count)) for name, one in sorted(self.means.items())}
        self.means = {}
        sums: Sums = {}
        for rank in self.gather(own):
            for name, (total, count) in rank.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + count
        return {name: total / count for name, (total, count) in sums.items() if count}
