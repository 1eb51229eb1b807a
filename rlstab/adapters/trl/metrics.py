"""Metrics under the names that TRL has for them."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate.utils import gather_object

from rlstab.adapters.trl.reports import REPORTS
from rlstab.adapters.window import Tallies

#: TRL's names; every other metric is under ``rlstab/``.
NAMES: Mapping[str, str] = {
    "tokens/entropy": "entropy",
    "ratio/clipped_low": "clip_ratio/low_mean",
    "ratio/clipped_high": "clip_ratio/high_mean",
    "kl/value": "kl",
    "steps/skipped": "rlstab/steps/without_gradient",  # TRL takes them
    **{name: name for name in REPORTS},
}


def tallies() -> Tallies:
    """Over the ranks of accelerate."""
    return Tallies(lambda own: gather_object([own]), NAMES, "rlstab/", "clip_ratio/region_mean")
