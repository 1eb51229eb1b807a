"""Has a run collapsed, and up to which value of a swept setting is a method stable? Detectors on bins of ten rollouts.

The thresholds are choices, made before any benchmark was run with them. They rest on trials of the tiny countdown
policy. Plain GRPO loses two thirds of its entropy in 500 rollouts while it still improves. A learning rate that is too
high ends in a reward near 0, zero-variance groups and a gradient near 0, while entropy stays or *rises*. Only without
a trust region did gradient norms spike, at forty times their mean. So no single curve shows a collapse, and each
detector stands for itself. ``collapsed`` in tables and sweeps is the fall of the reward, or a run that ended because
the trainer refused its optimizer steps for NaN or Inf; one that failed for another reason says nothing of its method.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstab.report.runs import EMPTY, RunRecord, bin_weights, binned, setting_of

#: Entropy has collapsed below this share of its first ten rollouts: well beyond the 0.3 that plain GRPO came to.
ENTROPY_FLOOR = 0.25
#: ... or below so many nats per token: nearly all tokens are then certain, whatever the start was.
ENTROPY_LEAST = 0.02
#: Entropy has blown up above this multiple of its first ten rollouts; where the learning rate was fatal it rose by 1.3.
ENTROPY_CEILING = 1.5
#: The reward has fallen if it ends below this share of its peak: noise of a peak and habit of a plateau lie above it.
REWARD_KEPT = 0.7
#: ... by at least so many times the noise of a bin.
REWARD_NOISE = 3.0
#: A norm above so many times the median so far is a spike; clipping at 1.0 hides it from the weights, not from here.
SPIKE = 10.0
#: More zero-variance groups than this share leave next to no gradient; ordinary runs stay at half.
ZERO_STD = 0.9
#: ... unless the reward is so high that the groups are solved instead.
SOLVED = 0.9
#: Responses are cut off if fewer than this share end by themselves ...
ENDED = 0.9
#: ... and it is at least so much less than at the start.
ENDED_DROP = 0.1
#: Bins below which a curve is too short to judge.
MIN_BINS = 3


@dataclass(frozen=True)
class Detection:
    """What one detector says of one run.

    Attributes:
        detector: its name, a key of :data:`DETECTORS`.
        fired: whether its definition holds; None if the run lacks the metric or is too short.
        rollout: last of the first bin where it does; None if it did not fire.
        value: what is compared with the threshold, at its worst or at the end as the definition says.
        text: the value in words, or why nothing can be said.
    """

    detector: str
    fired: bool | None
    rollout: int | None
    value: float | None
    text: str


#: What each detector means.
DEFINITIONS = {
    "reward_fall": (
        f"training reward over the last tenth below {REWARD_KEPT} x its best ten rollouts, the drop above "
        f"{REWARD_NOISE:g} x the noise of ten rollouts"
    ),
    "entropy_floor": (
        f"token entropy of ten rollouts below {ENTROPY_FLOOR} x that of the first ten, or below {ENTROPY_LEAST} nats"
    ),
    "entropy_blow_up": f"token entropy of ten rollouts above {ENTROPY_CEILING} x that of the first ten",
    "gradient_spikes": f"a gradient norm above {SPIKE:g} x the median so far of the mean norm of ten rollouts",
    "zero_std_groups": (
        f"more than {ZERO_STD} of the groups with equal rewards over the last tenth, at a reward below {SOLVED}"
    ),
    "truncation": (
        f"fewer than {ENDED} of the responses end by themselves over the last tenth, {ENDED_DROP} less than at first"
    ),
    "refused_steps": "an optimizer step refused for NaN or Inf",
    "below_start": "training reward over the last tenth below that of the policy at the start",
}

TITLES = {
    "reward_fall": "reward fall",
    "entropy_floor": "entropy floor",
    "entropy_blow_up": "entropy blow-up",
    "gradient_spikes": "gradient spikes",
    "zero_std_groups": "zero-variance groups",
    "truncation": "truncation",
    "refused_steps": "refused optimizer steps",
    "below_start": "ends below start",
}


def last_tenth(run: RunRecord, name: str) -> float | None:
    """Mean of a metric over the last tenth of the rollouts, rounded up to whole bins of ten."""
    ends, values = binned(run, name)
    if not len(values):
        return None
    inside = ends > run.rollouts - max(1, run.rollouts // 10)
    if not inside.any():
        return None
    return float(np.average(values[inside], weights=bin_weights(run, ends)[inside]))


def detect(run: RunRecord) -> list[Detection]:
    """What every detector says of a run, finished or not."""
    return [detector(run) for detector in DETECTORS.values()]


def collapsed(run: RunRecord) -> bool:
    """Whether its reward fell, or it failed over NaN or Inf."""
    diverged = run.status == "failed" and "NonFinite" in (run.error or "")
    return diverged or reward_fall(run).fired is True


def reward_fall(run: RunRecord) -> Detection:
    """See ``DEFINITIONS["reward_fall"]``. Noise: median absolute difference of neighbouring bins, as a deviation."""
    ends, values = binned(run, "reward/mean")
    end = last_tenth(run, "reward/mean")
    if len(values) < MIN_BINS or end is None:
        return _unknown("reward_fall", "reward/mean", len(values))
    place = int(values.argmax())
    peak = float(values[place])
    # differences of two independent values vary by the square root of two more than each; 1.4826 for normal noise
    noise = 1.4826 * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2)
    low = (values < REWARD_KEPT * peak) & (np.arange(len(values)) > place)
    fired = bool(peak > 0 and end < REWARD_KEPT * peak and peak - end > REWARD_NOISE * noise and low.any())
    share = end / peak if peak > 0 else 1.0
    return Detection(
        "reward_fall",
        fired,
        _first(ends, low) if fired else None,
        share,
        f"ends at {end:.3g}, {share:.2f} x its peak of {peak:.3g} at rollout {ends[place]}",
    )


def entropy_floor(run: RunRecord) -> Detection:
    """See ``DEFINITIONS["entropy_floor"]``."""
    ends, values = binned(run, "tokens/entropy")
    if len(values) < MIN_BINS:
        return _unknown("entropy_floor", "tokens/entropy", len(values))
    low = values < max(ENTROPY_FLOOR * values[0], ENTROPY_LEAST)
    share = float(values.min() / values[0]) if values[0] > 0 else 0.0
    text = f"lowest {values.min():.3g} nats, {share:.2f} x its start"
    return Detection("entropy_floor", bool(low.any()), _first(ends, low), share, text)


def entropy_blow_up(run: RunRecord) -> Detection:
    """See ``DEFINITIONS["entropy_blow_up"]``."""
    ends, values = binned(run, "tokens/entropy")
    if len(values) < MIN_BINS:
        return _unknown("entropy_blow_up", "tokens/entropy", len(values))
    high = values > ENTROPY_CEILING * max(float(values[0]), ENTROPY_LEAST)
    share = float(values.max() / max(float(values[0]), ENTROPY_LEAST))
    text = f"highest {values.max():.3g} nats, {share:.2f} x its start"
    return Detection("entropy_blow_up", bool(high.any()), _first(ends, high), share, text)


def gradient_spikes(run: RunRecord) -> Detection:
    """See ``DEFINITIONS["gradient_spikes"]``. The value is the largest multiple; the text counts bins with one."""
    means = dict(zip(*(one.tolist() for one in binned(run, "gradient/norm")), strict=True))
    ends, found = run.largest.get("gradient/largest_norm", EMPTY)
    largest = {end: value for end, value in zip(ends.tolist(), found.tolist(), strict=True) if end in means}
    if len(largest) < MIN_BINS:
        return _unknown("gradient_spikes", "gradient/largest_norm", len(largest))
    # so far: in a run that dies, later norms are near 0, and the ordinary ones before would look like spikes
    ends = np.array(list(largest), dtype=np.int64)
    medians = _running_medians([means[end] for end in largest])
    multiples = np.array(list(largest.values())) / np.maximum(medians, np.finfo(np.float64).tiny)
    high = multiples > SPIKE
    text = f"{int(high.sum())} of {len(high)} tens of rollouts; the largest norm is {multiples.max():.3g} x the median"
    return Detection("gradient_spikes", bool(high.any()), _first(ends, high), float(multiples.max()), text)


def zero_std_groups(run: RunRecord) -> Detection:
    """See ``DEFINITIONS["zero_std_groups"]``. The rollout is the first from which the share stays above."""
    ends, values = binned(run, "reward/zero_std_groups")
    end, reward = last_tenth(run, "reward/zero_std_groups"), last_tenth(run, "reward/mean")
    if len(values) < MIN_BINS or end is None or reward is None:
        return _unknown("zero_std_groups", "reward/zero_std_groups", len(values))
    fired = end > ZERO_STD and reward < SOLVED
    below = np.flatnonzero(values <= ZERO_STD)
    since = ends[min(int(below[-1]) + 1, len(ends) - 1)] if len(below) else ends[0]
    text = f"{end:.2f} of the groups at the end, at reward {reward:.3g}"
    if end > ZERO_STD and not fired:
        text += ": solved"
    return Detection("zero_std_groups", fired, int(since) if fired else None, end, text)


def truncation(run: RunRecord) -> Detection:
    """See ``DEFINITIONS["truncation"]``."""
    ends, values = binned(run, "response/ended")
    end = last_tenth(run, "response/ended")
    if len(values) < MIN_BINS or end is None:
        return _unknown("truncation", "response/ended", len(values))
    low = (values < ENDED) & (values <= values[0] - ENDED_DROP)
    fired = bool(end < ENDED and end <= values[0] - ENDED_DROP and low.any())
    text = f"{end:.2f} end by themselves at the end, {values[0]:.2f} at first"
    return Detection("truncation", fired, _first(ends, low) if fired else None, end, text)


def refused_steps(run: RunRecord) -> Detection:
    """See ``DEFINITIONS["refused_steps"]``. A run without the metric has none: it is written only when counted."""
    ends, values = binned(run, "optimizer_steps/refused")
    count = float((values * bin_weights(run, ends)).sum()) if len(values) else 0.0
    bad = values > 0
    text = f"{round(count)} optimizer steps"
    return Detection("refused_steps", bool(bad.any()), _first(ends, bad), round(count), text)


def below_start(run: RunRecord) -> Detection:
    """See ``DEFINITIONS["below_start"]``. The start is the evaluation at rollout 0, else the first ten rollouts."""
    # an evaluation has no flaky grader, so what it is compared with has none either
    name = "reward/true" if "reward/true" in run.metrics else "reward/mean"
    ends, values = binned(run, name)
    end = last_tenth(run, name)
    if len(values) < MIN_BINS or end is None:
        return _unknown("below_start", name, len(values))
    first = run.evaluations[0] if run.evaluations else {}
    evaluated = first.get("rollout") == 0 and "eval/mean" in first
    start = first["eval/mean"] if evaluated else float(values[0])
    low = values < start
    text = f"ends at {end:.3g}, began at {start:.3g} ({'held out' if evaluated else 'first ten rollouts'})"
    return Detection("below_start", end < start, _first(ends, low) if end < start else None, end - start, text)


DETECTORS: dict[str, Callable[[RunRecord], Detection]] = {
    "reward_fall": reward_fall,
    "entropy_floor": entropy_floor,
    "entropy_blow_up": entropy_blow_up,
    "gradient_spikes": gradient_spikes,
    "zero_std_groups": zero_std_groups,
    "truncation": truncation,
    "refused_steps": refused_steps,
    "below_start": below_start,
}


def _running_medians(values: Sequence[float]) -> NDArray[np.float64]:
    """The median of each value and all before it."""
    ordered: list[float] = []
    medians = []
    for value in values:
        insort(ordered, value)
        middle = len(ordered) // 2
        medians.append(ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
    return np.array(medians)


def _first(ends: NDArray[np.int64], where: NDArray[np.bool_]) -> int | None:
    return int(ends[where.argmax()]) if where.any() else None


def _unknown(detector: str, metric: str, bins: int) -> Detection:
    why = f"{metric} is missing" if not bins else f"too short: {bins} tens of rollouts, and it takes {MIN_BINS}"
    return Detection(detector, None, None, None, why)


# -- sweeps ------------------------------------------------------------------------------------------------------------

#: Differ between the runs of one bench without being swept.
IGNORED = ("seed", "tracking", "objective", "stages")


@dataclass(frozen=True)
class SweepPoint:
    """One method at one value.

    Attributes:
        method: its name.
        setting: name of the setting.
        value: of the swept key.
        runs: all of them.
        collapsed: whose reward fell, or that failed over NaN or Inf.
        below_start: that end below the reward they began with.
        unknown: not collapsed, but unfinished, failed for another reason, or too short to say.
        stable: every run finished, none collapsed, none ended below its start.
    """

    method: str
    setting: str
    value: float
    runs: int
    collapsed: int
    below_start: int
    unknown: int
    stable: bool


@dataclass(frozen=True)
class Sweep:
    """A bench whose settings differ in one number.

    Attributes:
        bench: its name; empty for runs made by ``rlstab train``.
        key: dotted path, such as ``optimisation.lr``.
        values: ascending.
        points: by method and value.
        highest: by method the highest value at which it is stable and at every lower one too; None if there is none.
    """

    bench: str
    key: str
    values: list[float]
    points: list[SweepPoint]
    highest: dict[str, float | None]


def sweeps_of(runs: Sequence[RunRecord]) -> list[Sweep]:
    """Of each bench, and of the runs without one, whose settings differ in exactly one number."""
    benches: dict[str, list[RunRecord]] = {}
    for run in runs:
        benches.setdefault(run.bench or "", []).append(run)
    found = []
    for bench, mine in benches.items():
        key = swept_key(mine)
        if key is not None:
            found.append(_sweep(bench, key, mine))
    return found


def swept_key(runs: Sequence[RunRecord]) -> str | None:
    """The dotted path in which settings differ, if it is exactly one, holds numbers, and is one number per setting."""
    by_setting: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        if run.config:
            own = {path: value for path, value in _flat(run.config).items() if path.partition(".")[0] not in IGNORED}
            if by_setting.setdefault(run.setting, own) != own:
                return None
    if len(by_setting) < 2:
        return None
    paths = {path for own in by_setting.values() for path in own}
    differing = [path for path in sorted(paths) if len({repr(own.get(path)) for own in by_setting.values()}) > 1]
    numbers = [own.get(differing[0]) for own in by_setting.values()] if len(differing) == 1 else [None]
    return differing[0] if all(isinstance(one, int | float) and not isinstance(one, bool) for one in numbers) else None


def _sweep(bench: str, key: str, runs: Sequence[RunRecord]) -> Sweep:
    groups: dict[tuple[str, float], list[RunRecord]] = {}
    for run in runs:
        value = setting_of(run.config, key)
        if value is None:  # a run that failed before it wrote its configuration: its setting's other runs say
            named = (setting_of(one.config, key) for one in runs if one.setting == run.setting and one.config)
            value = next(named, None)
        if value is None:
            continue
        groups.setdefault((run.method, float(value)), []).append(run)
    points = [_point(method, value, some) for (method, value), some in sorted(groups.items())]
    highest: dict[str, float | None] = {}
    for method in dict.fromkeys(point.method for point in points):
        highest[method] = None
        for point in points:
            if point.method == method:
                if not point.stable:
                    break
                highest[method] = point.value
    return Sweep(bench, key, sorted({point.value for point in points}), points, highest)


def _point(method: str, value: float, runs: Sequence[RunRecord]) -> SweepPoint:
    fell = [collapsed(run) for run in runs]
    starts = [below_start(run).fired for run in runs]
    unknown = sum(
        not down and (run.status != "finished" or below is None)
        for run, down, below in zip(runs, fell, starts, strict=True)
    )
    lower = starts.count(True)
    return SweepPoint(
        method, runs[0].setting, value, len(runs), sum(fell), lower, unknown, stable=not (any(fell) or lower or unknown)
    )


def _flat(data: Any, place: str = "") -> dict[str, Any]:
    if isinstance(data, Mapping):
        return {path: value for key, one in data.items() for path, value in _flat(one, f"{place}{key}.").items()}
    return {place.rstrip("."): data}
