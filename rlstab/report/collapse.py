"""Whether a run was lost, and how many runs a method loses: the first outcome of a comparison.

A run is lost if its reward fell, as ``reward_fall`` of :mod:`rlstab.signs` or the ``collapse`` of its bench defines it,
if its rewards are NaN or Inf at the end or in more than half of the rollouts, or if it ended because the trainer
refused its optimizer steps for NaN or Inf. One that failed for another reason, or is unfinished, says nothing about its
method from then on.
"""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from rlstab import signs
from rlstab.bins import EMPTY, WIDTH
from rlstab.config.settings import CollapseRule
from rlstab.report.runs import RunRecord, curve
from rlstab.report.statistics import Share, exact_p, holm, share

REWARD = "reward/mean"
#: Bins below which a curve is too short to judge.
MIN_BINS = 3
Survival: TypeAlias = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class Fate:
    """What became of a run.

    Attributes:
        lost: whether it was lost; None if that cannot be told.
        rollout: the last of the bin in which it was lost, else of the run: a results file has no finer steps.
    """

    lost: bool | None
    rollout: int


def collapsed(run: RunRecord) -> bool:
    """Whether a run was lost."""
    return fate_of(run).lost is True


@lru_cache(2**12)  # asked for again and again
def fate_of(run: RunRecord) -> Fate:
    """Whether a run was lost, and when."""
    if run.status == "failed" and "NonFinite" in (run.error or ""):
        return Fate(True, run.rollouts)
    if (fell := _nan_from(run)) is None:
        try:
            fell = _by_rule(run, CollapseRule.model_validate(run.collapse))
        except ValidationError:  # none, or a damaged one
            sign = signs.SIGNS["reward_fall"].detect(run)
            fell = sign.step if sign.fired else None if sign.fired is None else 0
    if fell:
        return Fate(True, min(-(-fell // WIDTH) * WIDTH, run.rollouts))
    return Fate(None if fell is None or run.status != "finished" else False, run.rollouts)


def nan_share(run: RunRecord) -> float:
    """The share of its rewards that are NaN or Inf."""
    return float(_rewards(run)[1].mean()) if len(_rewards(run)[1]) else 0.0


def _rewards(run: RunRecord) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The rollouts with a reward, and whether it is not finite: results files and logs of others leave those out."""
    rollouts, values = run.metrics.get(REWARD, EMPTY)
    if not run.metrics or not (REWARD in run.not_finite or (run.bin_width > 1 and len(rollouts))):
        return rollouts, ~np.isfinite(values)
    rollouts_of_any = np.unique(np.concatenate([steps for steps, _ in run.metrics.values()]))
    return rollouts_of_any, ~np.isin(rollouts_of_any, rollouts[np.isfinite(values)])


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
    """The rollout from which on a metric stays below a bench's bound; 0 if it does not, None if it is too short."""
    ends, values = curve(run, rule.metric)
    if len(ends) < (1 if rule.metric.startswith("eval/") else MIN_BINS):
        return None
    bound = rule.below * {"peak": float(values.max()), "start": float(values[0]), "value": 1.0}[rule.of]
    if values[ends > ends[-1] - max(1, run.rollouts // 10)].mean() >= bound:
        return 0
    above = np.flatnonzero(values >= bound)[-1:] + 1
    return int(ends[min(above[0], len(ends) - 1)] if len(above) else ends[0])


@dataclass(frozen=True)
class Losses:
    """The runs that a method lost, and the signs in all its runs, unfinished and failed ones too.

    Attributes:
        runs: all of them.
        failed: how many of them failed.
        rate: their share of those that can be judged, with its exact interval.
        pairs: seeds that can be judged for both method and baseline.
        p: the p-value of the exact McNemar test of these pairs, adjusted for all methods (Holm); None for the baseline.
        survival: rollouts, the share of runs that was not lost by then (Kaplan and Meier), and the ends of its interval
            at 95 %, None where nothing is lost yet, or everything.
        fired: the number of runs in which a detector fired, by detector.
        judged: the number of runs that a detector could judge, by detector.
    """

    runs: int
    failed: int
    rate: Share
    pairs: int
    p: float | None
    survival: Survival
    fired: Counter[str]
    judged: Counter[str]


def losses_of(runs: Mapping[str, Sequence[RunRecord]], baseline: str | None) -> dict[str, Losses]:
    """By method, the runs that were lost, as compared with the baseline."""
    fates = {
        method: {run.seed: fate.lost for run in group if (fate := fate_of(run)).lost is not None}
        for method, group in runs.items()
    }
    base = fates.get(baseline or "", {})
    pairs = {
        method: [(by_seed[seed], base[seed]) for seed in by_seed.keys() & base.keys()]
        for method, by_seed in fates.items()
    }
    sides = {method: (pair.count((True, False)), pair.count((False, True))) for method, pair in pairs.items()}
    p = holm({method: exact_p(*counts) for method, counts in sides.items() if method != baseline})
    losses = {}
    for method, by_seed in fates.items():
        judgements = [(name, detector.detect(run)) for run in runs[method] for name, detector in signs.COUNTED.items()]
        losses[method] = Losses(
            runs=len(runs[method]),
            failed=sum(run.status == "failed" for run in runs[method]),
            rate=share(sum(by_seed.values()), len(by_seed)),
            pairs=len(pairs[method]),
            p=p.get(method),
            survival=_survival(runs[method]),
            fired=Counter(name for name, sign in judgements if sign.fired),
            judged=Counter(name for name, sign in judgements if sign.fired is not None),
        )
    return losses


def _survival(runs: Sequence[RunRecord]) -> Survival:
    """The curve and its interval on the scale of log(-log); runs that were not lost are censored at their end."""
    from scipy import stats  # takes a second to import

    times, is_lost = np.array([fate_of(run).rollout for run in runs], float), np.array(list(map(collapsed, runs)))
    if not is_lost.any():
        return (0, float(times.max())), (1.0, 1.0), (None, None), (None, None)
    steps = stats.ecdf(stats.CensoredData(uncensored=times[is_lost], right=times[~is_lost])).sf
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
