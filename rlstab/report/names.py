"""Runs of several folders that have one name: what differs between them goes into their names.

A bench names its runs, so there it is the bench that gets the name of its folder. A run of ``rlstab train`` is called
after its methods alone: a setting in which such runs differ goes into their setting, one of a method into their method,
and what is left is told by the folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlstab.report.model import RunRecord
from rlstab.report.numbers import setting

#: Say how a run was made or how long, not what it is; they name runs that nothing else tells apart.
MINOR = (
    "evaluation",
    "optimisation.rollouts",
    "optimisation.micro_batch_size",
    "rollout.batch_size",
    "task.time_limit",
    "task.workers",
)

#: Never part of a name.
APART = ("seed", "tracking")

#: Parts of a run that belong to its method.
OF_METHOD = ("objective", "stages", "advantage")

#: Values that one name shows; where they do not tell the runs apart, all are shown.
SHOWN = 3


def told_apart(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The same runs, in the same order, no two of one bench, setting, method and seed."""
    found = dict(enumerate(runs))
    for bench, places in _grouped(found, lambda run: run.bench or "").items():
        if bench and _clash(found[one] for one in places):
            _by_place(found, places)
    plain = [place for place, run in found.items() if not run.bench]
    for places in _grouped({one: found[one] for one in plain}, lambda run: (run.setting, run.method)).values():
        _by_settings(found, places, lambda path: not _within(path, (*MINOR, *APART)))
    for places in _clashing(found):
        _by_settings(found, places, lambda path: _within(path, MINOR))
    for places in _clashing(found):
        labels = _tails([found[one].path for one in places])
        for one, label in zip(places, labels, strict=True):
            found[one] = replace(found[one], setting=_joined(found[one].setting, label))
    return list(found.values())


def _name(run: RunRecord) -> tuple[str, str, str, int]:
    return run.bench or "", run.setting, run.method, run.seed


def _grouped(runs: Mapping[int, RunRecord], key: Callable[[RunRecord], Hashable]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for place, run in runs.items():
        groups.setdefault(key(run), []).append(place)
    return groups


def _clashing(runs: Mapping[int, RunRecord]) -> list[list[int]]:
    return [places for places in _grouped(runs, _name).values() if len(places) > 1]


def _clash(runs: Iterable[RunRecord]) -> bool:
    names = [_name(run) for run in runs]
    return len(set(names)) < len(names)


def _by_place(found: dict[int, RunRecord], places: Sequence[int]) -> None:
    """Benches of one name are told by their folders or results files."""
    roots = {one: _root(found[one].path) for one in places}
    distinct = list(dict.fromkeys(roots.values()))
    if len(distinct) > 1:
        label = dict(zip(distinct, _tails(distinct), strict=True))
        for one in places:
            found[one] = replace(found[one], bench=f"{found[one].bench} ({label[roots[one]]})")


def _root(path: str) -> str:
    """The results file of a run, or the folder of its bench."""
    file = re.fullmatch(r"(.*):\d+", path)
    if file:
        return file[1]
    parts = Path(path).parts
    return str(Path(path).parents[3]) if len(parts) > 4 and parts[-4] == "runs" else path


def _by_settings(found: dict[int, RunRecord], places: Sequence[int], asked: Callable[[str], bool]) -> None:
    """Those that differ, of the settings that all of them have: an older version may have written fewer."""
    own = {one: dict(_flat(config)) for one, config in _with_stages({one: found[one].config for one in places}).items()}
    shared = [path for path in next(iter(own.values())) if all(path in values for values in own.values())]
    differ = [path for path in shared if asked(path) and len({repr(values[path]) for values in own.values()}) > 1]
    of_method = [path for path in differ if _within(path, OF_METHOD)]
    of_run = [path for path in differ if path not in of_method]
    for one, label in _labels(own, of_method).items():
        found[one] = replace(found[one], method=f"{found[one].method} ({label})")
    for one, label in _labels(own, of_run).items():
        found[one] = replace(found[one], setting=_joined(found[one].setting, label))


def _with_stages(configs: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """Configurations whose stages go by name, and those that not all have are told by one value: ``overlong + opo``."""
    settings = {
        one: {str(item["name"]): item for item in config["stages"]}
        for one, config in configs.items()
        if isinstance(config.get("stages"), list) and all(isinstance(item, Mapping) for item in config["stages"])
        if all("name" in item for item in config["stages"])
    }
    if len(settings) < len(configs):  # written by hand, or by a version that had none
        return dict(configs)
    everywhere = set.intersection(*(set(one) for one in settings.values()))
    found: dict[int, Mapping[str, Any]] = {}
    for one, stages in settings.items():
        of_its_own = [name for name in stages if name not in everywhere]
        found[one] = {
            **{key: value for key, value in configs[one].items() if key != "stages"},
            "stages": " + ".join(of_its_own) or "none",
            **{f"stages.{name}": stages[name] for name in sorted(everywhere)},
        }
    return found


def _labels(own: Mapping[int, Mapping[str, Any]], paths: Sequence[str]) -> dict[int, str]:
    """``lr=1e-4, epochs=2`` by run; nothing where nothing differs."""
    if not paths:
        return {}
    last = [path.rpartition(".")[2] for path in paths]
    short = [name if last.count(name) == 1 else path for name, path in zip(last, paths, strict=True)]

    def labels(count: int) -> dict[int, str]:
        chosen = list(zip(short, paths, strict=True))[:count]
        return {
            one: ", ".join(f"{name}={_shown(values[path])}" for name, path in chosen) for one, values in own.items()
        }

    wanted = len({repr([values[path] for path in paths]) for values in own.values()})
    few = labels(SHOWN)
    return few if len(set(few.values())) == wanted else labels(len(paths))


def _shown(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return setting(value)
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def _joined(name: str, label: str) -> str:
    return label if name == "default" else f"{name}, {label}"


def _within(path: str, parts: Sequence[str]) -> bool:
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def _flat(data: Any, place: str = "") -> Iterable[tuple[str, Any]]:
    """Values by dotted path; a method in a list is called by its number in it."""
    if isinstance(data, Mapping) and data:
        for key, one in data.items():
            yield from _flat(one, f"{place}{key}.")
    elif isinstance(data, list) and any(isinstance(one, Mapping) for one in data):
        for index, one in enumerate(data):
            yield from _flat(one, f"{place}{index}.")
    else:
        yield place.rstrip("."), str(data) if isinstance(data, list | dict) else data


def _tails(paths: Sequence[str]) -> list[str]:
    """The shortest ends, in whole names, that tell paths apart."""
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        ends = ["/".join(one[-count:]) for one in parts]
        if len(set(ends)) == len(ends):
            return ends
    return [str(path) for path in paths]
