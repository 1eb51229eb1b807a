"""Metrics under the names that verl has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from verl.utils.metric import AggregationType, Metric

from rlstab.adapters.tallies import Sums, Tallies

#: verl's names; every other metric is under ``rlstab/``. verl puts ``actor/`` before those that have none.
NAMES: Mapping[str, str] = {
    "tokens/entropy": "actor/entropy_loss",
    "ratio/clipped_dual": "actor/pg_clipfrac_lower",
    "ratio/drift": "actor/ppo_kl",
    "kl/value": "actor/kl_loss",
}
#: The sum of the two sides.
CLIPPED = "actor/pg_clipfrac"


def tallies(group: Any) -> Tallies:
    """Over the ranks of a process group."""

    def over_ranks(own: Sums) -> list[Sums]:
        found: list[Sums] = [own] * dist.get_world_size(group)
        dist.all_gather_object(found, own, group=group)
        return found

    return Tallies(over_ranks)


def named(means: Mapping[str, float]) -> dict[str, Metric]:
    """Means as verl's metrics: over the optimizer steps of an update verl takes their mean, whatever their name."""
    found = {NAMES.get(name, f"actor/rlstab/{name}"): value for name, value in means.items()}
    sides = [means[side] for side in ("ratio/clipped_low", "ratio/clipped_high") if side in means]
    found |= {CLIPPED: sum(sides)} if sides else {}
    return {name: Metric(AggregationType.MEAN, value) for name, value in found.items()}
