"""Goals, and what the kept results say of them. The goals themselves are in goals.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.protocol import Record

GOALS = Path(__file__).with_name("goals.toml")
#: Presets of the check; no result of theirs counts for a goal proper.
SMALL = ["S", "M"]
Verdict = Literal["aim", "must", "missed", "unmeasured"]


@dataclass(frozen=True)
class Limits:
    """What a value is held to; see ``better`` of its goal."""

    must: float
    aim: float


@dataclass(frozen=True)
class Goal:
    """One row of the table.

    Attributes:
        row: its name.
        says: what the value is.
        better: which way is good.
        limits: for the shapes that count.
        check: for the small shapes; None where the check leaves it out.
        where, of, over: which records; ``over`` None makes the value no ratio.
        by: keys that tell one comparison from another.
        value: the field of a record.
        unmeasured: why there is no value, or nothing.
    """

    row: str
    says: str
    better: Literal["higher", "lower"]
    limits: Limits
    check: Limits | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    of: Mapping[str, Any] = field(default_factory=dict)
    over: Mapping[str, Any] | None = None
    by: tuple[str, ...] = ()
    value: str = ""
    unmeasured: str = ""

    def small(self) -> Goal:
        """The same on the shapes of the check, held to its limits."""
        assert self.check is not None
        return replace(self, where={**self.where, "preset": SMALL}, limits=self.check, check=None)

    def judge(self, value: float | None) -> Verdict:
        """What a value reaches."""
        if value is None:
            return "unmeasured"
        held = self.limits
        sign = 1 if self.better == "higher" else -1
        if sign * value >= sign * held.aim:
            return "aim"
        return "must" if sign * value >= sign * held.must else "missed"


@dataclass(frozen=True)
class Found:
    """A value of a goal: the worst over its comparisons.

    Attributes:
        value: it.
        where: the comparison, such as ``A, float32``.
        run: the run that it was measured in.
        values: of all comparisons, by name.
    """

    value: float
    where: str
    run: str
    values: Mapping[str, float]


def load(path: Path = GOALS) -> list[Goal]:
    """All goals of a file, in order."""
    goals = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["goal"]:
        limits, check = Limits(entry.pop("must"), entry.pop("aim")), entry.pop("check", None)
        by = tuple(entry.pop("by", ()))
        goals.append(Goal(**entry, by=by, limits=limits, check=Limits(**check) if check else None))
    return goals


def matches(record: Record, wanted: Mapping[str, Any]) -> bool:
    """Whether a record has the wanted values; a list wants one of its members."""
    return all(
        record.get(key) in value if isinstance(value, list) else record.get(key) == value
        for key, value in wanted.items()
    )


def evaluate(goal: Goal, records: Iterable[Record], *, back: int = 0) -> Found | None:
    """The value of a goal in the newest run of each of its comparisons, or ``back`` runs before it.

    Both sides of a ratio come from one run: at another time the same machine is another machine.
    """
    comparisons: dict[tuple[Any, ...], dict[str, float]] = {}
    fitting = [record for record in records if not goal.unmeasured and matches(record, goal.where)]
    fitting.sort(key=lambda record: (record["date"], record["run"]))  # the last is the newest
    for (run, *where), group in _groups(fitting, ("run", *goal.by)):
        value = _ratio(goal, group)
        if value is not None:
            comparisons.setdefault(tuple(where), {})[run] = value
    newest = {where: list(runs.items())[-1 - back] for where, runs in comparisons.items() if len(runs) > back}
    if not newest:
        return None
    worst = (min if goal.better == "higher" else max)(newest, key=lambda where: newest[where][1])
    run, value = newest[worst]
    return Found(value, _name(worst), run, {_name(where): ratio for where, (_, ratio) in newest.items()})


def _name(where: tuple[Any, ...]) -> str:
    return ", ".join(f"{part:g} live" if isinstance(part, float) else str(part) for part in where)


def _groups(records: list[Record], keys: tuple[str, ...]) -> Iterable[tuple[tuple[Any, ...], list[Record]]]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record.get(key) for key in keys), []).append(record)
    return groups.items()


def _ratio(goal: Goal, records: list[Record]) -> float | None:
    def least(wanted: Mapping[str, Any]) -> float | None:
        values = [
            record[goal.value] for record in records if matches(record, wanted) and record.get(goal.value) is not None
        ]
        present = {record["case"] for record in records if matches(record, wanted)}
        named = wanted.get("case", [])
        if isinstance(named, list) and not set(named) <= present:
            return None  # the fastest of several is not known before all of them have run
        return min(values, default=None)

    top = least(goal.of)
    if goal.over is None or top is None:
        return top
    bottom = least(goal.over)
    return None if bottom is None else top / bottom
