"""What the page opens with: the one picture that shows what its first sentence says."""

from __future__ import annotations

from dataclasses import dataclass

from rlstab.report.comparison import Comparison
from rlstab.report.curves import metrics_of
from rlstab.report.outcomes import AREA, DERIVED

#: Points of a curve of evaluations below which the training curve shows more.
FEWEST = 3


@dataclass(frozen=True)
class Opening:
    """The picture.

    Attributes:
        metric: whose curve it is; None for a sweep, and where there is nothing to draw.
        sweep: its place among the sweeps of the comparison; None for a curve.
    """

    metric: str | None
    sweep: int | None


def opening(comparison: Comparison) -> Opening:
    """The sweep where that is all there is, else the curve of the main outcome."""
    if len(comparison.sweeps) == 1 and comparison.outcomes and len({one.bench for one in comparison.tables}) == 1:
        return Opening(None, 0)
    found = metrics_of(comparison.loaded.runs)
    if comparison.outcomes:
        return Opening(curve_of(comparison, comparison.outcomes[0].name), None)
    return Opening("reward/mean" if "reward/mean" in found else None, None)


def curve_of(comparison: Comparison, outcome: str) -> str:
    """The metric whose curve shows best how an outcome came about."""
    if outcome in DERIVED:
        return "reward/mean"
    runs = comparison.loaded.runs
    found = metrics_of(runs)
    if outcome.startswith("eval/"):
        most = max((sum(outcome in one for one in run.evaluations) for run in runs), default=0)
        trained = "tokens/entropy" if outcome == "eval/entropy" else "reward/mean"
        return trained if most < FEWEST and trained in found else outcome
    return outcome.removesuffix(AREA) if outcome not in found else outcome
