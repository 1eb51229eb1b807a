"""Whether a run was lost, and how many runs a method loses: the first outcome of a comparison.

A run is lost if its reward fell, as ``reward_fall`` of :mod:`rlstab.signs` or the ``collapse`` of its bench defines it,
if its rewards are NaN or Inf at the end or in more than half of the rollouts, or if it ended because the trainer refused
its optimizer steps for NaN or Inf. One that failed for another reason, or is unfinished, says nothing about its method
from then on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from rlstab import signs
from rlstab.bins import EMPTY, WIDTH, binned
from rlstab.config.settings import CollapseRule
from rlstab.report.runs import RunRecord, curve
from rlstab.report.statistics import Estimate, exact_p, holm, share

REWARD = "reward/mean"
#: Columns of a step function.
Survival: TypeAlias = tuple[tuple[float | None, ...], ...]
#: Bins below which a curve is too short to judge.
MIN_BINS = 3


@dataclass(frozen=True)
class Fate:
    """What became of a run.

    Attributes:
        lost: whether it was lost; None if that cannot be told.
        rollout: the last of the bin in which it was lost, else of the run: a results file has no finer steps.
    """

    lost: bool | None
    rollout: int


def fate_of(run: RunRecord) -> Fate:
    """Whether a run was lost, and when."""
    known: dict[str, Fate] = vars(run).setdefault("_fate", {})  # asked for again and again
    if "fate" not in known:
        known["fate"] = _fate(run)
    return known["fate"]


def collapsed(run: RunRecord) -> bool:
    """Whether a run was lost."""
    return fate_of(run).lost is True


def rule_of(run: RunRecord) -> CollapseRule | None:
    """What its bench calls a collapse; None if it does not say."""
    try:
        return CollapseRule.model_validate(run.collapse)
    except ValidationError:
        return None


def _fate(run: RunRecord) -> Fate:
    if run.status == "failed" and "NonFinite" in (run.error or ""):
        return Fate(True, run.rollouts)
    fell = _nan_from(run)
    if fell is None and (rule := rule_of(run)) is not None:
        fell = _by_rule(run, rule)
    elif fell is None:
        sign = signs.SIGNS["reward_fall"].detect(run)
        fell = sign.step if sign.fired else None if sign.fired is None else 0
    if fell:
        return Fate(True, min(-(-fell // WIDTH) * WIDTH, run.rollouts))
    return Fate(None if fell is None or run.status != "finished" else False, run.rollouts)


def nan_share(run: RunRecord) -> float:
    """The share of its rewards that are NaN or Inf."""
    return float(_rewards(run)[1].mean()) if len(_rewards(run)[1]) else 0.0


def _rewards(run: RunRecord) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The rollouts with a reward, and whether it is not finite, which a results file leaves out."""
    rollouts, values = run.metrics.get(REWARD, EMPTY)
    if run.bin_width == 1 or not len(rollouts):
        return rollouts, ~np.isfinite(values)
    every = np.unique(np.concatenate([ends for ends, _ in run.metrics.values()]))
    return every, ~np.isin(every, binned(run, REWARD)[0])


def _nan_from(run: RunRecord) -> int | None:
    """The rollout from which on rewards are NaN or Inf; None unless that is so at the end, or of most of them."""
    rollouts, absent = _rewards(run)
    if not len(rollouts):
        return None
    late = rollouts > rollouts[-1] - max(1, run.rollouts // 10)
    if max(absent.mean(), absent[late].mean()) <= 0.5:
        return None
    start = np.flatnonzero(~absent)[-1] + 1 if absent[late].all() and not absent.all() else absent.argmax()
    return int(rollouts[start])


def _by_rule(run: RunRecord, rule: CollapseRule) -> int | None:
    """The rollout from which on a metric stays below the bound of a bench; 0 if it does not, None if it is too short."""
    ends, values = curve(run, rule.metric)
    if len(ends) < MIN_BINS and not rule.metric.startswith("eval/") or not len(ends):
        return None
    bound = rule.below * {"peak": float(values.max()), "start": float(values[0]), "value": 1.0}[rule.of]
    if values[ends > ends[-1] - max(1, run.rollouts // 10)].mean() >= bound:
        return 0
    above = np.flatnonzero(values >= bound)[-1:] + 1
    return int(ends[min(above[0], len(ends) - 1)] if len(above) else ends[0])


@dataclass(frozen=True)
class Losses:
    """The runs that a method lost.

    Attributes:
        lost: how many.
        judged: of how many.
        rate: their share, with its exact interval.
        pairs: seeds that can be judged for both method and baseline.
        p: of the exact McNemar test of these pairs, adjusted for all methods (Holm); None for the baseline.
        survival: rollouts, the share of runs that was not lost by then (Kaplan and Meier), and the ends of its interval
            at 95 %, None where nothing is lost yet, or everything.
    """

    lost: int
    judged: int
    rate: Estimate
    pairs: int
    p: float | None
    survival: Survival


def losses_of(runs: Mapping[str, Sequence[RunRecord]], baseline: str | None) -> dict[str, Losses]:
    """By method, the runs that were lost."""
    fates = {method: {run.seed: fate_of(run) for run in some} for method, some in runs.items()}
    lost = {
        method: {seed: fate.lost for seed, fate in some.items() if fate.lost is not None}
        for method, some in fates.items()
    }
    base = lost.get(baseline or "", {})
    pairs = {method: [(some[seed], base[seed]) for seed in some.keys() & base.keys()] for method, some in lost.items()}
    p_values = {
        method: exact_p(pairs[method].count((True, False)), pairs[method].count((False, True)))
        for method in lost
        if method != baseline and pairs[method]
    }
    adjusted = holm(p_values)
    return {
        method: Losses(
            sum(some.values()),
            len(some),
            share(sum(some.values()), len(some)),
            len(pairs[method]),
            adjusted.get(method),
            _survival(list(fates[method].values())),
        )
        for method, some in lost.items()
    }


def _survival(fates: Sequence[Fate]) -> Survival:
    """The curve and its interval on the scale of log(-log); runs that were not lost are censored at their end."""
    from scipy import stats  # takes a second to import

    times, lost = np.array([fate.rollout for fate in fates], float), np.array([fate.lost is True for fate in fates])
    if not times.any() or not lost.any():
        end = float(times.max(initial=0))
        return (0, end), (1.0, 1.0), (None, None), (None, None)
    steps = stats.ecdf(stats.CensoredData(uncensored=times[lost], right=times[~lost])).sf
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings(action="ignore"):
        band = steps.confidence_interval(0.95, method="log-log")
    columns = steps.quantiles, steps.probabilities, band.low.probabilities, band.high.probabilities
    return tuple(
        (start, *(number if math.isfinite(number) else None for number in column.tolist()))
        for start, column in zip((0.0, 1.0, None, None), columns, strict=True)
    )


def all_below_start(runs: Iterable[RunRecord]) -> list[str]:
    """A sentence if every run that can be judged, the baseline's included, ended below its start."""
    below = [sign.fired for run in runs if (sign := signs.COUNTED["below_start"].detect(run)).fired is not None]
    if not below or not all(below):
        return []
    which = f"All {len(below)} runs, those of the baseline too," if len(below) > 1 else "The run"
    return [f"{which} ended below the reward at the start: nothing here improved the policy."]
