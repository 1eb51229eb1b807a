"""Which figures a report has: what its runs measured decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlstab.report.curves import metrics_of
from rlstab.report.metric_names import in_order
from rlstab.report.model import RunRecord

#: What a run measures whatever its methods are; the rest belongs to methods, by its prefix.
GENERAL = (
    *("reward/", "response/", "scorer/", "tokens/", "ratio/", "sampler/", "gradient/", "head/"),
    *("optimizer_steps/", "eval/"),
)
#: Curves that say nothing of a comparison.
_ASIDE = ("sampler/gap", "sampler/largest_gap", "sampler/gap_live", "sampler/largest_gap_live", "loss")
_GRADIENTS = ("gradient/norm", "gradient/largest_norm")
_SHARES = ("tokens/live", "tokens/kept", "ratio/clipped_high", "ratio/clipped_low", "ratio/clipped_dual")
#: First choices of the panels of learning curves.
_LEARNING = ("reward/mean", "eval/mean", "tokens/entropy", "eval/pass@", "response/length", "eval/greedy")


@dataclass(frozen=True)
class Panels:
    """Names of metrics, by the figure that shows them.

    Attributes:
        choices: every metric that a reader can choose for a learning curve, the usual ones first.
        learning: the choices that the learning curves begin with, the usual ones first.
        trajectory: whether entropy and reward are both there.
        gradients: norms.
        shares: what part of the tokens took part in the update.
        own: by method, the metrics that it logs itself.
    """

    choices: list[str]
    learning: list[str]
    trajectory: bool
    gradients: list[str]
    shares: list[str]
    own: dict[str, list[str]]


def panels_of(runs: Iterable[RunRecord]) -> Panels:
    """The figures that some runs have something to show in."""
    found = in_order(metrics_of(runs))
    own: dict[str, list[str]] = {}
    for name in found:
        method, _, _ = name.rpartition("/")
        if method and not name.startswith(GENERAL):
            own.setdefault(method, []).append(name)
    # the largest k says most about what the policy can still find
    largest = [name for name in found if name.startswith("eval/pass@")][-1:]
    wanted = [name for one in _LEARNING for name in (largest if one == "eval/pass@" else [one]) if name in found]
    return Panels(
        choices=[name for name in found if name not in _ASIDE],
        learning=wanted,
        trajectory={"tokens/entropy", "reward/mean"} <= set(found),
        gradients=[name for name in _GRADIENTS if name in found],
        shares=[name for name in _SHARES if name in found],
        own=own,
    )
