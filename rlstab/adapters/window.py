"""The micro-batches of one optimizer step, planned together and settled at its end, and means over many steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import Plan, make_plan
from rlstab.core.stats import Mean
from rlstab.errors import NonFinite


@dataclass(eq=False)
class Window:
    """One optimizer step of this rank.

    Attributes:
        plan: None until the evidence is there, or where it was refused.
        batches: the evidence that the plan was made from.
        refusal: why it was refused, before or after the backward passes.
        unscored: log-probs that the sampler could not give.
        place: the micro-batch whose turn it is.
        nonfinite: live values that are NaN or Inf so far.
        reports: metrics of the micro-batches so far.
    """

    plan: Plan | None = None
    batches: Sequence[TokenBatch] = ()
    refusal: str | None = None
    unscored: list[Tensor] = field(default_factory=list)
    place: int = 0
    nonfinite: Tensor | None = None
    reports: list[Mapping[str, Mean]] = field(default_factory=list)

    def make_plan(self, objective: TokenObjective, state: State, comm: Comm) -> None:
        """Decide about the step from the evidence in :attr:`batches`; NaN or Inf in it refuses the step."""
        try:
            self.plan = make_plan(objective, self.batches, state, comm)
        except NonFinite as error:
            self.refusal = str(error)

    def add(self, nonfinite: Tensor, report: Mapping[str, Mean]) -> None:
        """Note what a micro-batch gave; nothing is waited for."""
        self.place += 1
        self.nonfinite = nonfinite if self.nonfinite is None else self.nonfinite + nonfinite
        self.reports.append(report)

    def refuse_nonfinite(self, comm: Comm, norm: float = 0.0) -> None:
        """Refuse the step if a live value on any rank, or the gradient norm, is NaN or Inf; every rank calls it."""
        nonfinite = torch.zeros((), dtype=torch.float64) if self.nonfinite is None else self.nonfinite.double().cpu()
        count = int(comm.sum(nonfinite))
        if self.refusal is None and (count or not math.isfinite(norm)):
            self.refusal = (
                f"{count} live values of the policy, or of gates, are NaN or Inf"
                f"{'' if math.isfinite(norm) else f', and the gradient norm is {norm}'}. Weights and state stay."
            )

    def scale_rates(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Scale the learning rate for this step. What is returned gives the schedule its own back."""
        rates = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in rates:
            group["lr"] = rate * (1.0 if self.plan is None else self.plan.lr_scale)

        def restore() -> None:
            for group, rate in rates:
                group["lr"] = rate

        return restore

    @property
    def moves_nothing(self) -> bool:
        """It was refused, or nothing in it has a gradient: weights and moments stay."""
        return self.refusal is not None or self.plan is None or self.plan.has_no_gradient

    def summary(self, objective: TokenObjective) -> dict[str, Mean]:
        """Metrics of the step as a whole; of a refused one, which may hold NaN, that it was."""
        metrics = {"steps/refused": Mean.scalar(float(self.refusal is not None))}
        plan = self.plan
        if plan is None or self.refusal is not None:
            return metrics
        metrics |= {
            "steps/skipped": Mean.scalar(float(plan.has_no_gradient)),
            "lr_scale": Mean.scalar(plan.lr_scale),
            "tokens/live": Mean(*map(_number, (plan.live_tokens, plan.everything.tokens))),
        }
        if "rollout_logprobs" in objective.needs:
            lost = torch.stack([count.double() for count in self.unscored]).sum()
            metrics["sampler/unscored"] = Mean(lost, _number(sum(len(batch) for batch in self.batches)))
        return metrics


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


#: Our names of the two shares of clipped tokens.
SIDES = ("ratio/clipped_low", "ratio/clipped_high")
#: By name, a sum and a count.
Sums: TypeAlias = dict[str, tuple[float, float]]


class Tallies:
    """Means over micro-batches, optimizer steps and ranks: a sum and a count each, left on the device until asked.

    Args:
        gather: the sums of every rank, from those of this one.
        names: those that the host has, by ours; every other metric is under ``prefix``.
        prefix: of ours.
        clipped: the host's name of the sum of both shares of clipped tokens.
    """

    def __init__(
        self, gather: Callable[[Sums], Sequence[Sums]], names: Mapping[str, str], prefix: str, clipped: str
    ) -> None:
        self.gather, self.names, self.prefix, self.clipped = gather, names, prefix, clipped
        self.means: dict[str, Mean] = {}

    def add(self, report: Mapping[str, Mean]) -> None:
        """Merge a report."""
        for name, mean in report.items():
            self.means[name] = self.means[name].merge(mean) if name in self.means else mean

    def add_step(self, window: Window, objective: TokenObjective) -> None:
        """Merge what an optimizer step tells: of a refused one, its micro-batches count for nothing."""
        refused = window.plan is None or window.refusal is not None
        for report in (window.summary(objective), *([] if refused else window.reports)):
            self.add(report)

    def collect(self) -> dict[str, float]:
        """The means over all ranks by the host's names, without what nothing was counted for; then all begins anew.

        Every rank calls it.
        """
        own = {name: (float(mean.total), float(mean.count)) for name, mean in sorted(self.means.items())}
        self.means = {}
        sums: Sums = {}
        for rank in self.gather(own):
            for name, (total, count) in rank.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + count
        means = {name: total / count for name, (total, count) in sums.items() if count}
        metrics = {self.names.get(name, f"{self.prefix}{name}"): value for name, value in means.items()}
        sides = [means[side] for side in SIDES if side in means]
        return metrics | ({self.clipped: sum(sides)} if sides else {})
