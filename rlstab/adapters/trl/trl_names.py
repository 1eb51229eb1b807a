"""Metrics under the names that TRL has for them, averaged over everything that was counted between two log lines."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate.utils import gather_object

from rlstab.core.stats import Mean

#: TRL's names; every other metric is under ``rlstab/``.
NAMES: Mapping[str, str] = {
    "tokens/entropy": "entropy",
    "ratio/clipped_low": "clip_ratio/low_mean",
    "ratio/clipped_high": "clip_ratio/high_mean",
    "kl/value": "kl",
}
#: The sum of the two sides.
REGION = "clip_ratio/region_mean"


class Tallies:
    """Means over micro-batches, optimizer steps and ranks: a sum and a count each, left on the device until asked."""

    def __init__(self) -> None:
        self.means: dict[str, Mean] = {}

    def add(self, report: Mapping[str, Mean]) -> None:
        """Merge a report."""
        for name, one in report.items():
            self.means[name] = self.means[name].merge(one) if name in self.means else one

    def collect(self) -> dict[str, float]:
        """The means over all ranks by TRL's names, without what nothing was counted for; then everything begins anew.

        Every rank calls it.
        """
        own = {name: (float(one.total), float(one.count)) for name, one in sorted(self.means.items())}
        self.means = {}
        sums: dict[str, tuple[float, float]] = {}
        for rank in gather_object([own]):
            for name, (total, count) in rank.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + count
        found = {_named(name): total / count for name, (total, count) in sums.items() if count}
        sides = [found[NAMES[side]] for side in ("ratio/clipped_low", "ratio/clipped_high") if NAMES[side] in found]
        return {**found, **({REGION: sum(sides)} if sides else {})}


def _named(name: str) -> str:
    return NAMES.get(name, f"rlstab/{name}")
