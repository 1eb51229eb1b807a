"""Benches whose settings differ in one number: up to which value does each method stay stable?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from operator import attrgetter
from typing import Any

from rlstab import signs
from rlstab.config.allowed_changes import is_measured
from rlstab.report.collapse import collapsed
from rlstab.report.formatting import setting
from rlstab.report.names import settings_between
from rlstab.report.runs import RunRecord, flat, grouped

#: Settings that differ between the runs of one bench without being swept, like neutral ones.
IGNORED = ("objective", "code")

#: Coarseness of a sampler's weights: the step of rounding as a share of the largest, or of each number.
COARSENESS = {None: 0.0, "bf16": 2**-9, "int8": 1 / 127, "fp8": 2**-4, "int4": 1 / 7, "int3": 1 / 3, "int2": 1.0}


@dataclass(frozen=True)
class SweepPoint:
    """One method at one value.

    Attributes:
        method: its name.
        setting: name of the setting.
        value: what the swept key is set to.
        runs: all of them.
        collapsed: how many lost their reward, or failed because of NaN or Inf.
        below_start: how many end below the reward that they began with.
        unknown: how many did not collapse, but are unfinished, failed for another reason, or too short to say.
    """

    method: str
    setting: str
    value: float
    runs: int
    collapsed: int
    below_start: int
    unknown: int

    @property
    def stable(self) -> bool:
        """Whether every run finished, none collapsed, and none ended below its start."""
        return not (self.collapsed or self.below_start or self.unknown)


@dataclass(frozen=True)
class Sweep:
    """A bench whose settings differ in one number.

    Attributes:
        bench: its name; empty for runs made by ``rlstab train``.
        key: dotted path, such as ``optimisation.lr`` or ``stages.overlong.buffer``; for ``rollout.precision``, values
            are the coarseness of the weights.
        values: ascending.
        points: one for each method and value, ascending for each method.
    """

    bench: str
    key: str
    values: list[float]
    points: list[SweepPoint]

    @cached_property
    def by_method(self) -> dict[str, dict[float, SweepPoint]]:
        """The points by method and value."""
        methods = grouped(self.points, attrgetter("method")).items()
        return {method: {point.value: point for point in points} for method, points in methods}

    @cached_property
    def highest(self) -> dict[str, float | None]:
        """By method, the highest value at which it is stable and at every lower one too; None if there is none."""
        stable = attrgetter("stable")
        return {
            method: max((point.value for point in takewhile(stable, points.values())), default=None)
            for method, points in self.by_method.items()
        }

    def highest_stable(self, method: str) -> str:
        """The highest value at which a method is stable, in words; what cannot be judged does not count as unstable."""
        highest = self.highest[method]
        next_point = next((point for point in self.by_method[method].values() if not point.stable), None)
        if next_point and not next_point.collapsed and not next_point.below_start:
            unclear = f"{setting(next_point.value)} cannot be judged"
            return f"cannot be told ({unclear})" if highest is None else f"at least {setting(highest)} ({unclear})"
        return f"none of {len(self.values)}" if highest is None else setting(highest)

    @property
    def labels(self) -> list[str]:
        """The values with three digits."""
        return [setting(float(f"{value:.3g}")) for value in self.values]

    @property
    def is_logarithmic(self) -> bool:
        """Whether its axis is: over more than a factor of four, since rates are tried by factors."""
        return self.values[0] > 0 and self.values[-1] / self.values[0] >= 4


def sweeps_of(runs: Sequence[RunRecord]) -> list[Sweep]:
    """The sweep of each bench, and of the runs without one, whose settings differ in exactly one number."""
    benches = grouped(runs, lambda run: run.bench or "").items()
    return [_sweep(bench, key, group) for bench, group in benches if (key := swept_key(group)) is not None]


def swept_key(runs: Sequence[RunRecord]) -> str | None:
    """The dotted path in which settings differ, if there is exactly one and each setting has one number there.

    Each method may have its own settings, such as stages: only differences between runs of one method count.
    """
    methods = grouped(runs, attrgetter("method")).values()
    paths = {path for group in methods for path in settings_between(group, method=True)}
    swept = [path for path in paths if path.partition(".")[0] not in IGNORED and not is_measured(path)]
    if len(swept) != 1:
        return None
    settings = grouped((run for run in runs if run.config), attrgetter("setting")).values()
    values = [[_value(run, swept[0]) for run in group] for group in settings]
    numeric = all(isinstance(first, int | float) and not isinstance(first, bool) for first, *_ in values)
    return swept[0] if numeric and all(value == group[0] for group in values for value in group) else None


def _value(run: RunRecord, path: str) -> Any:
    value = dict(flat(run.config)).get(path)
    return COARSENESS.get(value) if path == "rollout.precision" else value


def _sweep(bench: str, key: str, runs: Sequence[RunRecord]) -> Sweep:
    # if a run failed before it wrote its configuration, other runs of its setting have the value
    values = {run.setting: float(_value(run, key)) for run in runs if run.config}
    groups = grouped((run for run in runs if run.setting in values), lambda run: (run.method, values[run.setting]))
    points = [_point(method, value, group) for (method, value), group in sorted(groups.items())]
    return Sweep(bench, key, sorted(set(values.values())), points)


def _point(method: str, value: float, runs: Sequence[RunRecord]) -> SweepPoint:
    fell, starts = [collapsed(run) for run in runs], [signs.COUNTED["below_start"].detect(run).fired for run in runs]
    unknown = sum(
        not down and (run.status != "finished" or below is None)
        for run, down, below in zip(runs, fell, starts, strict=True)
    )
    return SweepPoint(method, runs[0].setting, value, len(runs), sum(fell), starts.count(True), unknown)
