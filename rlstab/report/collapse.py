"""Whether a run has collapsed.

``collapsed`` in tables and sweeps is the fall of the reward, or a run that ended because the trainer refused its
optimizer steps for NaN or Inf; one that failed for another reason says nothing about its method. The signs are those of
:mod:`rlstab.signs`.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlstab import signs
from rlstab.report.runs import RunRecord


def collapsed(run: RunRecord) -> bool:
    """Whether its reward fell, or it failed because of NaN or Inf."""
    diverged = run.status == "failed" and "NonFinite" in (run.error or "")
    return diverged or signs.reward_fall.detect(run).fired is True


def all_below_start(runs: Iterable[RunRecord]) -> list[str]:
    """A sentence if every run that can be judged, the baseline's included, ended below its start."""
    below = [sign.fired for run in runs if (sign := signs.below_start.detect(run)).fired is not None]
    if not below or not all(below):
        return []
    which = f"All {len(below)} runs, those of the baseline too," if len(below) > 1 else "The run"
    return [f"{which} ended below the reward at the start: nothing here improved the policy."]
