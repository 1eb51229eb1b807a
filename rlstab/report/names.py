"""Names of runs that tell them apart: by their benches, by the settings in which they differ, and by their folders."""

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from rlstab.config.allowed_changes import is_measured, is_neutral
from rlstab.config.user_code import portable
from rlstab.report.formatting import setting
from rlstab.report.runs import JOINED, RunRecord, flat, grouped

#: Parts of a run that belong to its method.
OF_METHOD = ("objective", "stages")
#: Values that a name shows; all are shown if these do not tell the runs apart.
SHOWN = 3


def told_apart(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The same runs, renamed so that no two have the same bench, setting, method and seed.

    Benches of one name are told apart by their folders. Where runs of one method and setting, or those of ``rlstab
    train``, which are called after their methods alone, were made with different settings, these go into their setting,
    one of a method into their method, and the rest are told apart by the folder.
    """
    named = _renamed(runs, lambda run: run.bench or "", _with_benches)
    named = _renamed(named, lambda run: (run.bench or "", run.setting, "" if run.bench else run.method), _with_settings)
    return _renamed(named, name_of, _with_folders)


def name_of(run: RunRecord) -> tuple[str, str, str, int]:
    """Bench, setting, method and seed."""
    return run.bench or "", run.setting, run.method, run.seed


def _renamed(
    runs: Sequence[RunRecord], key: Callable[[RunRecord], Any], rename: Callable[[list[RunRecord]], list[RunRecord]]
) -> list[RunRecord]:
    """Each group of runs that share a key, renamed separately."""
    return [run for _, group in groupby(sorted(runs, key=key), key) for run in rename(list(group))]


def _with_benches(runs: list[RunRecord]) -> list[RunRecord]:
    """If benches of one name have the same runs, they are told apart by their folders."""
    roots = list(dict.fromkeys(root_of(run.path) for run in runs))
    if not runs[0].bench or len(roots) == 1 or len(set(map(name_of, runs))) == len(runs):
        return runs
    tails = dict(zip(roots, tails_of(roots), strict=True))
    return [replace(run, bench=f"{run.bench} ({tails[root_of(run.path)]})") for run in runs]


def _with_folders(runs: list[RunRecord]) -> list[RunRecord]:
    if len(runs) == 1:
        return runs
    tails = tails_of([run.path for run in runs])
    return [
        replace(run, setting=_joined(run.setting, tail), repeats=run.setting)
        for run, tail in zip(runs, tails, strict=True)
    ]


def root_of(path: str) -> str:
    """The results file of a run, or the folder of its bench."""
    if file := re.fullmatch(r"(.*):\d+", path):
        return file[1]
    parts = Path(path).parts
    return str(Path(path).parents[3]) if len(parts) > 4 and parts[-4] == "runs" else path


def _with_settings(runs: list[RunRecord]) -> list[RunRecord]:
    """Runs of one setting by the settings in which those of one method differ."""
    methods = grouped(runs, attrgetter("method")).items()
    of_methods = {name: settings_between(group, method=True).keys() for name, group in methods}
    differ = sorted({path for paths in of_methods.values() for path in paths if not is_measured(path)})
    if not differ:
        return runs
    configured = [run for run in runs if run.config]
    flats = map(_flat, configured)
    values = [{path: _value(settings_of_run, path) for path in differ} for settings_of_run in flats]
    if "stages" in differ:  # only stages that some of them lack are informative
        stages = [str(value["stages"]).split(JOINED) for value in values]
        common = set.intersection(*map(set, stages))
        for value, names in zip(values, stages, strict=True):
            value["stages"] = JOINED.join(name for name in names if name not in common) or "none"
    of_method = [path for path in differ if _within(path, OF_METHOD)]
    labels = [f" ({label})" for label in _labels(values, of_method)]
    settings = _labels(values, [path for path in differ if path not in of_method])
    named = [
        replace(
            run,
            method=run.method + (label if of_methods[run.method] & {*of_method} else ""),
            setting=_joined(run.setting, setting),
        )
        for run, label, setting in zip(configured, labels, settings, strict=True)
    ]
    # a run that failed before it wrote its settings is counted with most of the others
    usual = Counter(run.setting for run in named).most_common(1)[0][0]
    return [*named, *(replace(run, setting=usual) for run in runs if not run.config)]


def settings_between(runs: Sequence[RunRecord], *, method: bool = False) -> dict[str, tuple[Any, ...]]:
    """The settings that count and in which runs differ, by dotted path, with the value of each run.

    Neutral settings and the seed never count; see :class:`rlstab.config.settings.Neutral`. Those that change what an
    evaluation measures do. A setting that only some runs know is of another release, and left out.

    Args:
        runs: those without a configuration are left out.
        method: whether objective and stages count too.
    """
    configured = [run for run in runs if run.config]
    if len(configured) < 2 or all(
        (run.config, run.about.get("code")) == (configured[0].config, configured[0].about.get("code"))
        for run in configured
    ):
        return {}
    differ = {}
    flats = [_flat(run) for run in configured]
    for path in sorted(set().union(*flats)):
        values = [_value(settings_of_run, path) for settings_of_run in flats]
        counts = path != "seed" and (method or not _within(path, OF_METHOD)) and _MISSING not in values
        counts = counts and (
            is_measured(path) or not all(is_neutral(path, settings_of_run) for settings_of_run in flats)
        )
        if counts and len(set(map(repr, values))) > 1:
            differ[path] = tuple(values)
    return differ


#: A value that a run does not record.
_MISSING = "(missing)"


def _flat(run: RunRecord) -> dict[str, Any]:
    """The settings by dotted path, and checksums of the files of code and data that they name."""
    code = run.about.get("code")
    sums = {f"code.{Path(name).stem}": value for name, value in code.items()} if isinstance(code, Mapping) else {}
    return {**dict(flat(portable(run.config))), **sums}


def _value(values: Mapping[str, Any], path: str) -> Any:
    """The value of a setting; a whole section in a line."""
    if path in values:
        return values[path]
    section = {key.removeprefix(f"{path}."): value for key, value in values.items() if key.startswith(f"{path}.")}
    return ", ".join(f"{key}={shown(value)}" for key, value in section.items()) if section else _MISSING


def _labels(values: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> list[str]:
    """``lr=1e-4, epochs=2`` for each run; empty if nothing differs."""
    last = [path.rpartition(".")[2] for path in paths]
    names = [name if last.count(name) == 1 else path for name, path in zip(last, paths, strict=True)]

    def labels(count: int) -> list[str]:
        pairs = list(zip(names, paths, strict=True))[:count]
        return [", ".join(f"{name}={shown(value[path])}" for name, path in pairs) for value in values]

    distinct = len({repr([value[path] for path in paths]) for value in values})
    shortest = labels(SHOWN)
    return shortest if len(set(shortest)) == distinct else labels(len(paths))


def shown(value: Any) -> str:
    """A value of a setting as a name shows it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return setting(value)
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def _joined(name: str, label: str) -> str:
    if not label:
        return name
    return label if name == "default" else f"{name}, {label}"


def _within(path: str, parts: Sequence[str]) -> bool:
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def tails_of(paths: Sequence[str]) -> list[str]:
    """Paths relative to the last folder that holds them all."""
    absolute = [Path(path).absolute() for path in paths]
    common = os.path.commonpath(absolute)
    return [str(path.relative_to(common)) for path in absolute]
