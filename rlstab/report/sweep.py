"""The highest value of a swept setting, such as the learning rate, at which a method is stable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlstab.report.collapse import below_start, collapsed
from rlstab.report.model import RunRecord, setting_of

#: Differ between the runs of one bench without being swept.
IGNORED = ("seed", "tracking", "objective", "stages", "advantage")


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
