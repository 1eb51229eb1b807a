"""Metrics under the names that TRL has for them."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate.utils import gather_object

from rlstab.adapters.window import Sums, Tallies

#: TRL's names; every other metric is under ``rlstab/``.
NAMES: Mapping[str, str] = {
    "tokens/entropy": "entropy",
    "ratio/clipped_low": "clip_ratio/low_mean",
    "ratio/clipped_high": "clip_ratio/high_mean",
    "kl/value": "kl",
}
#: The sum of the two sides.
REGION = "clip_ratio/region_mean"


def tallies() -> Tallies:
    """Over the ranks of accelerate."""
    return Tallies(_over_ranks)


def named(means: Mapping[str, float]) -> dict[str, float]:
    """Means by TRL's names."""
    found = {NAMES.get(name, f"rlstab/{name}"): value for name, value in means.items()}
    sides = [found[NAMES[side]] for side in ("ratio/clipped_low", "ratio/clipped_high") if NAMES[side] in found]
    return {**found, **({REGION: sum(sides)} if sides else {})}


def _over_ranks(own: Sums) -> list[Sums]:
    found: list[Sums] = gather_object([own])
    return found
