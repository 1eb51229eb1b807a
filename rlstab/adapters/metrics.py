"""Metrics of optimizer steps over all ranks, under the names of a host."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rlstab.core.metrics import RunningMeans, means_over_ranks
from rlstab.core.stats import Mean
from rlstab.core.step import OptimizerStep
from rlstab.hosts import facts

T = TypeVar("T")

#: rlstab's names of the two shares of clipped tokens.
SIDES = ("ratio/clipped_low", "ratio/clipped_high")


class HostMetrics:
    """Means over micro-batches, optimizer steps and ranks.

    Args:
        host: key of :data:`rlstab.hosts.HOSTS`.
        group: process group of the ranks; None is the default one.
    """

    def __init__(self, host: str, group: Any = None) -> None:
        self.names, self.group, self.means = facts(host), group, RunningMeans()

    def add(self, step: OptimizerStep) -> None:
        """Merge the metrics of an optimizer step; of a refused step, which may hold NaN, only that it was refused."""
        self.means.add({"steps/refused": Mean.scalar(float(step.refusal is not None))})
        plan = step.plan
        if plan is None or step.refusal is not None:
            return
        counts = torch.tensor([plan.live_tokens, plan.everything.tokens], dtype=torch.float64)
        settled = {
            "steps/skipped": Mean.scalar(float(plan.has_no_gradient)),
            "lr_scale": Mean.scalar(plan.lr_scale),
            "tokens/live": Mean(counts[0], counts[1]),
        }
        for report in (settled, *step.reports):
            self.means.add(report)

    def collect(self) -> dict[str, float]:
        """The means over all ranks since the last call, by the host's names. Every rank must call it."""
        ranks = from_ranks(self.means.take(), self.group)
        means = means_over_ranks(ranks)
        names, prefix = self.names["metrics"], self.names["prefix"]
        if "empty" in self.names:
            means = dict.fromkeys(names.keys() & {name for sums in ranks for name in sums}, self.names["empty"]) | means
        metrics = {names.get(name, f"{prefix}{name}"): value for name, value in means.items()}
        sides = [means[side] for side in SIDES if side in means]
        return metrics | ({self.names["clipped"]: sum(sides)} if sides else {})


def from_ranks(value: T, group: Any = None) -> list[T]:
    """The value of every rank of a process group, in rank order; this one alone where there are no ranks."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
