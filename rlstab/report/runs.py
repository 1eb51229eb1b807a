"""Records of runs, on which everything in ``report`` works."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from rlstab.bins import Curve, Run, Sign, bin_weights, binned, evaluated

#: Between the names of several parts.
JOINED = " + "

Item = TypeVar("Item")
Status: TypeAlias = Literal["finished", "unfinished", "failed"]


@dataclass(frozen=True, eq=False, kw_only=True)
class RunFacts:
    """What a run is and how it ended, under the same names as in a results file.

    Attributes:
        bench: name of its bench; None for a run made by ``rlstab train``.
        setting: name of its setting, ``default`` where there is none.
        method: name of what is compared.
        seed: pairs runs across methods.
        status: ``finished``, ``unfinished`` (fewer rollouts than ``optimisation.rollouts``) or ``failed``.
        error: last lines of what a failed run raised.
        config: the resolved run; empty if its file is missing or damaged.
        about: ``run.json``: hashes, versions, machine; empty likewise.
        command: makes the run again.
        cpu_seconds: what its process used.
        seconds: wall time.
        baseline: method that the bench compares with.
        bench_command: makes the whole bench again.
        bench_about: what the bench asks and what to know about its figures, or empty.
        judged: signs by detector, judged on every rollout, of a run that a results file keeps in bins of ten.
        collapse: what the bench calls a collapse, as in its file; None if it does not say.
    """

    bench: str | None
    setting: str
    method: str
    seed: int
    status: Status
    error: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    cpu_seconds: float | None = None
    seconds: float | None = None
    baseline: str | None = None
    bench_command: str | None = None
    bench_about: str = ""
    judged: Mapping[str, Sign] = field(default_factory=dict)
    collapse: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class RunRecord(RunFacts, Run):
    """One run as a report compares it.

    Attributes:
        by: what it was cut by, if it is the part of a run within a budget; see :mod:`rlstab.report.cost`.
        repeats: the setting from which it was taken, since its seed ran there more than once; else empty.
        written: the time of its last metrics, in seconds since 1970; of two copies the newer one counts.
    """

    by: str = "rollouts"
    repeats: str = ""
    written: float = 0.0

    @property
    def title(self) -> str:
        """Bench, setting, method and seed, for texts."""
        return " ".join([*([self.bench] if self.bench else []), self.setting, self.method, f"seed {self.seed}"])


@dataclass(frozen=True)
class LeftOut:
    """Something at ``path`` that cannot be used, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class Loaded:
    """Everything that was read.

    Attributes:
        runs: the usable runs, sorted by bench, setting, method and seed.
        left_out: what could not be used.
        notes: what to know about the rest: unfinished or damaged runs, mixed versions, runs that have not begun.
        not_begun: runs that the benches name and that have no folder yet.
        order: the position of a setting in the file of its bench, by bench and setting.
    """

    runs: list[RunRecord]
    left_out: list[LeftOut]
    notes: list[str]
    not_begun: int = 0
    order: Mapping[tuple[str, str], int] = field(default_factory=dict)


def grouped(items: Iterable[Item], key: Callable[[Item], Hashable]) -> dict[Any, list[Item]]:
    """Items by a key, in their order."""
    groups: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def objective_names(config: Mapping[str, Any]) -> list[str]:
    """Names of the methods of a resolved run, numbered where one occurs several times."""
    items = config.get("objective")
    if not isinstance(items, list):
        return []
    names = []
    for item in items:
        if isinstance(item, Mapping) and "name" in item:
            name, observed = _short(item), item.get("method")
            if name == "observe" and isinstance(observed, Mapping) and "name" in observed:
                name = f"observe_{_short(observed)}"  # as in metrics
            names.append(name)
    return [
        f"{name}_{names[: index + 1].count(name)}" if names.count(name) > 1 else name
        for index, name in enumerate(names)
    ]


def _short(method: Mapping[str, Any]) -> str:
    """The name of a method, without the folder of the file that has its class."""
    return str(method["name"]).rpartition("/")[2]


def flat(data: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted path. A list of named parts gives their names, and below it each part by its name."""
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from flat(value, f"{place}{key}.")
    elif isinstance(data, list) and data and all(isinstance(item, Mapping) and "name" in item for item in data):
        names = objective_names({"objective": data})
        yield place.rstrip("."), JOINED.join(names)
        for name, item in zip(names, data, strict=True):
            yield from flat(item, f"{place}{name}.")
    else:
        yield place.rstrip("."), str(data) if isinstance(data, list | dict) else data


def curve(run: RunRecord, metric: str) -> Curve:
    """A metric in bins of rollouts, or as evaluated."""
    return evaluated(run, metric) if metric.startswith("eval/") else binned(run, metric)


def best_bin(record: RunRecord) -> tuple[float, int, int] | None:
    """The highest reward of a bin, its last rollout, and its number of rollouts: a shorter last bin is noisier."""
    ends, values = binned(record, "reward/mean")
    if not len(values):
        return None
    counts = bin_weights(record.bin_width, ends)
    index = int(np.where(counts == counts.max(), values, -np.inf).argmax())
    return float(values[index]), int(ends[index]), int(counts[index])
