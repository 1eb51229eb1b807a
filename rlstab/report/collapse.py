"""Has a run collapsed, and up to which value of a swept setting is a method stable?

``collapsed`` in tables and sweeps is the fall of the reward, or a run that ended because the trainer refused its
optimizer steps for NaN or Inf; one that failed for another reason says nothing of its method. The signs are those of
:mod:`rlstab.signs`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from rlstab import signs
from rlstab.report.runs import RunRecord, flat
from rlstab.signs import Detector, Sign

#: By name, in the order of the report's tables, the signs that it counts: those that a method may prevent.
DETECTORS: Mapping[str, Detector] = {
    "reward_fall": signs.reward_fall,
    "entropy_floor": signs.entropy_floor,
    "entropy_blow_up": signs.entropy_blow_up,
    "gradient_spikes": signs.gradient_spikes,
    "zero_std_groups": signs.zero_std_groups,
    "truncation": signs.growing_truncation,
    "refused_steps": signs.refused_steps,
    "below_start": signs.below_start,
}
TITLES = {name: detector.title for name, detector in DETECTORS.items()}
DEFINITIONS = {name: detector.definition for name, detector in DETECTORS.items()}


def detect(run: RunRecord) -> dict[str, Sign]:
    """What every detector says of a run, finished or not."""
    return {name: detector.detect(run) for name, detector in DETECTORS.items()}


def collapsed(run: RunRecord) -> bool:
    """Whether its reward fell, or it failed over NaN or Inf."""
    diverged = run.status == "failed" and "NonFinite" in (run.error or "")
    return diverged or signs.reward_fall.detect(run).fired is True


def all_below_start(runs: Iterable[RunRecord]) -> list[str]:
    """A sentence where every run that can be judged, also those of the baseline, ended below its start."""
    below = [sign.fired for run in runs if (sign := signs.below_start.detect(run)).fired is not None]
    if not below or not all(below):
        return []
    which = f"All {len(below)} runs, those of the baseline too," if len(below) > 1 else "The run"
    return [f"{which} ended below the reward at the start: nothing here improved the policy."]


# -- sweeps ------------------------------------------------------------------------------------------------------------
#: Differ between the runs of one bench without being swept.
IGNORED = ("seed", "tracking", "objective")

#: How coarse the weights of a sampler are: the step of rounding as a share of the largest, or of each number.
COARSENESS = {None: 0.0, "bf16": 2**-9, "int8": 1 / 127, "fp8": 2**-4, "int4": 1 / 7, "int3": 1 / 3, "int2": 1.0}


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
        key: dotted path, such as ``optimisation.lr`` or ``stages.overlong.buffer``; of ``rollout.precision`` the values
            are how coarse the weights are.
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
    benches: dict[str, list[RunRecord]] = defaultdict(list)
    for run in runs:
        benches[run.bench or ""].append(run)
    return [_sweep(bench, key, some) for bench, some in benches.items() if (key := swept_key(some)) is not None]


def swept_key(runs: Sequence[RunRecord]) -> str | None:
    """The dotted path in which settings differ, if it is exactly one, holds numbers, and is one number per setting.

    Each method may have settings of its own, such as stages: what counts is how those of one method differ.
    """
    of_methods: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for run in runs:
        if run.config:
            own = _dials(run.config)
            if of_methods[run.method].setdefault(run.setting, own) != own:
                return None
    differing: set[str] = set()
    for by_setting in of_methods.values():
        paths = {path for own in by_setting.values() for path in own}
        differing |= {path for path in paths if len({repr(own.get(path)) for own in by_setting.values()}) > 1}
    if len(differing) != 1:
        return None
    key = differing.pop()
    values: dict[str, Any] = {}
    for setting, own in (item for by_setting in of_methods.values() for item in by_setting.items()):
        if values.setdefault(setting, own.get(key)) != own.get(key):
            return None
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
    return key if numeric else None


def _dials(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run that may be swept, by dotted path."""
    values = {path: value for path, value in flat(config) if path.partition(".")[0] not in IGNORED}
    if "rollout.precision" in values:
        values["rollout.precision"] = COARSENESS.get(values["rollout.precision"])
    return values


def _sweep(bench: str, key: str, runs: Sequence[RunRecord]) -> Sweep:
    # of a run that failed before it wrote its configuration, its setting's other runs know the value
    values = {run.setting: float(_dials(run.config)[key]) for run in runs if run.config}
    groups: dict[tuple[str, float], list[RunRecord]] = defaultdict(list)
    for run in runs:
        if run.setting in values:
            groups[run.method, values[run.setting]].append(run)
    points = [_point(method, value, some) for (method, value), some in sorted(groups.items())]
    highest = {
        method: max((point.value for point in takewhile(lambda point: point.stable, some)), default=None)
        for method, some in groupby(points, lambda point: point.method)
    }
    return Sweep(bench, key, sorted(set(values.values())), points, highest)


def _point(method: str, value: float, runs: Sequence[RunRecord]) -> SweepPoint:
    fell, starts = [collapsed(run) for run in runs], [signs.below_start.detect(run).fired for run in runs]
    unknown = sum(
        not down and (run.status != "finished" or below is None)
        for run, down, below in zip(runs, fell, starts, strict=True)
    )
    stable = not (any(fell) or any(starts) or unknown)
    return SweepPoint(method, runs[0].setting, value, len(runs), sum(fell), starts.count(True), unknown, stable)
