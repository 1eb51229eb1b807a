"""Metrics of optimizer steps over all ranks, under the names of a host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstab.core.metrics import RunningMeans, Sums, means_over_ranks
from rlstab.core.stats import Mean
from rlstab.core.step import OptimizerStep

#: rlstab's names of the two shares of clipped tokens.
SIDES = ("ratio/clipped_low", "ratio/clipped_high")


@dataclass(frozen=True)
class HostNames:
    """The names of a host for metrics.

    Attributes:
        names: the host's name by rlstab's; other metrics have rlstab's name after ``prefix``.
        prefix: of other metrics.
        clipped: the host's name of the sum of both shares of clipped tokens.
    """

    names: Mapping[str, str]
    prefix: str
    clipped: str


TRL = HostNames(
    {
        "tokens/entropy": "entropy",
        "ratio/clipped_low": "clip_ratio/low_mean",
        "ratio/clipped_high": "clip_ratio/high_mean",
        "kl/value": "kl",
        "steps/skipped": "rlstab/steps/without_gradient",  # TRL takes them
        # made by :mod:`rlstab.adapters.trl.reports` for TRL alone
        **{name: name for name in ("policy_loss", "cispo_clip_ratio", "vespo/phi_seq_mean")},
    },
    prefix="rlstab/",
    clipped="clip_ratio/region_mean",
)
#: verl puts ``actor/`` before a name that has no prefix.
VERL = HostNames(
    {
        "tokens/entropy": "actor/entropy_loss",
        "ratio/clipped_dual": "actor/pg_clipfrac_lower",
        "ratio/drift": "actor/ppo_kl",
        "kl/value": "actor/kl_loss",
    },
    prefix="actor/rlstab/",
    clipped="actor/pg_clipfrac",
)


class HostMetrics:
    """Means over micro-batches, optimizer steps and ranks.

    Args:
        host: its names.
        gather: the sums of every rank, from those of this one.
    """

    def __init__(self, host: HostNames, gather: Callable[[Sums], Sequence[Sums]]) -> None:
        self.host, self.gather, self._means = host, gather, RunningMeans()

    def add(self, step: OptimizerStep) -> None:
        """Merge the metrics of an optimizer step; of a refused step, which may hold NaN, only that it was refused."""
        self._means.add({"steps/refused": Mean.scalar(float(step.refusal is not None))})
        plan = step.plan
        if plan is None or step.refusal is not None:
            return
        live, tokens = (_number(count) for count in (plan.live_tokens, plan.everything.tokens))
        self._means.add(
            {
                "steps/skipped": Mean.scalar(float(plan.has_no_gradient)),
                "lr_scale": Mean.scalar(plan.lr_scale),
                "tokens/live": Mean(live, tokens),
            }
        )
        for report in step.reports:
            self._means.add(report)

    def collect(self) -> dict[str, float]:
        """The means over all ranks since the last call, by the host's names. Every rank must call it."""
        means = means_over_ranks(self.gather(self._means.take()))
        metrics = {self.host.names.get(name, f"{self.host.prefix}{name}"): value for name, value in means.items()}
        sides = [means[side] for side in SIDES if side in means]
        return metrics | ({self.host.clipped: sum(sides)} if sides else {})


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
