"""Find and read runs: bench folders, run folders, folders of them, results files; whatever state they are in."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np

from rlstab.bins import EMPTY, Curve, highest, rounded
from rlstab.config.document import Document
from rlstab.errors import ReportError, reason
from rlstab.files import is_dir, is_file
from rlstab.report.formatting import METRICS, counted, setting
from rlstab.report.results_file import read_results
from rlstab.report.runs import (
    JOINED,
    MOST_ROLLOUTS,
    LeftOut,
    Loaded,
    RunRecord,
    flat,
    objective_names,
    running_total,
    setting_of,
)
from rlstab.safe_read import as_float, gaps, read_bytes, read_mapping, read_object, read_text, readable

#: Any of them makes a folder a run folder.
FILES = ("metrics.jsonl", "config.yaml", "run.json")

#: Folders below a path in which runs are looked for: OUT/runs/<setting>/<method>/seed-<k> and one around it.
DEPTH = 6

#: No bench names more: beyond it its file is damaged.
MOST_RUNS = 100_000


def load_runs(*paths: str | Path) -> Loaded:
    """Everything usable under some paths; what is not says why.

    Args:
        paths: bench folders, run folders, folders of such, and results files (``.jsonl``).

    Raises:
        ReportError: a path does not exist, or nothing usable is there at all.
    """
    every, left_out, planned = _search(paths)
    runs, copies = _without_copies(every)
    behind = [
        f"{name}: {missing} of the {counted(total, 'run')} that its bench.yaml names "
        f"{'has' if missing == 1 else 'have'} not begun."
        for name, (missing, total) in planned.items()
    ]
    not_begun = sum(missing for missing, _ in planned.values())
    return Loaded(runs, [*left_out, *copies], [*behind, *_notes(runs)], not_begun)


def find_runs(*paths: str | Path) -> tuple[list[RunRecord], list[LeftOut]]:
    """Every run under some paths as it lies there, by path and under its own name, and what is left out.

    Raises:
        ReportError: see :func:`load_runs`.
    """
    runs, left_out, _ = _search(paths)
    return sorted({run.path: run for run, _ in runs}.values(), key=_natural), left_out


def _search(
    paths: Sequence[str | Path],
) -> tuple[list[tuple[RunRecord, str]], list[LeftOut], dict[str, tuple[int, int]]]:
    """Runs with the path under which each lies, what is left out, and by bench how many runs are missing and named."""
    if not paths:
        raise ReportError("no runs were named. Give bench folders, run folders or results files (.jsonl).")
    items: list[tuple[RunRecord | LeftOut, str]] = []
    planned: dict[str, tuple[int, int]] = {}
    for path in map(Path, paths):
        if is_dir(path):
            records = list(_walk(path, planned)) or [
                LeftOut(str(path), "holds no run: no metrics.jsonl, config.yaml or run.json below it")
            ]
        elif is_file(path):
            records = read_results(path)
        else:
            raise ReportError(f"{path}: no such file or folder. Give bench folders, run folders or results files.")
        items += [(record, str(path)) for record in records]
    runs = [(record, path) for record, path in items if isinstance(record, RunRecord)]
    left_out = [record for record, _ in items if isinstance(record, LeftOut)]
    if not runs:
        reasons = "\n".join(f"  {item.path}: {item.why}" for item in left_out)
        raise ReportError(f"no usable run.\n{reasons}\nGive folders written by `rlstab train` or `rlstab bench`.")
    return runs, left_out, planned


def _walk(
    folder: Path, planned: dict[str, tuple[int, int]], bench: Mapping[str, Any] | None = None, depth: int = DEPTH
) -> Iterator[RunRecord | LeftOut]:
    if is_run(folder):
        yield read_folder(folder, bench)
        return
    own = read_mapping(folder / "bench.json")[0]
    if own:
        named = _named(folder)
        if missing := sum(not is_run(run) for run in named):
            planned[str(own.get("name") or folder)] = (missing, len(named))
    if depth:
        for inside in sorted(folder.iterdir()):
            if inside.is_dir() and not inside.is_symlink() and not inside.name.startswith("."):
                yield from _walk(inside, planned, own or bench, depth - 1)


def _named(folder: Path) -> list[Path]:
    """Folders of all runs that the file of a bench names; none where it is not there or damaged."""
    try:
        data = Document.parse(read_text(folder / "bench.yaml"), "bench.yaml").data
        settings, methods, seeds = (list(data[key]) for key in ("settings", "methods", "seeds"))
        if len(settings) * len(methods) * len(seeds) > MOST_RUNS:
            return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    names = product(settings, methods, seeds)
    return [folder / "runs" / str(setting) / str(method) / f"seed-{seed}" for setting, method, seed in names]


def _without_copies(runs: Sequence[tuple[RunRecord, str]]) -> tuple[list[RunRecord], list[LeftOut]]:
    """Of what was read of one run from several places the first by path stays; those of one source are told together.

    Runs that only have one name are several runs, and their names are made different.
    """
    kept: dict[tuple[object, ...], RunRecord] = {}
    copies: dict[str, list[str]] = defaultdict(list)
    for run, source in sorted(runs, key=lambda pair: _natural(pair[0])):
        id = (run.bench, run.seed, str(run.about["run_id"])) if "run_id" in run.about else (run.path,)
        first = kept.setdefault(id, run)
        if first.path != run.path:
            copies[source].append(f"{run.title} in {run.path} is also in {first.path}")
    unique = sorted(told_apart(list(kept.values())), key=lambda run: (run.bench or "", *_name(run)[1:]))
    return unique, [
        LeftOut(source, f"{counted(len(some), 'run')} read twice: {some[0]}; the first by path is kept")
        for source, some in copies.items()
    ]


def _natural(run: RunRecord) -> list[str | int]:
    """Line 2 before line 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", run.path)]


def _notes(runs: Sequence[RunRecord]) -> list[str]:
    notes = []
    for run in runs:
        if run.status == "unfinished":
            planned = "an unknown number of" if run.planned is None else run.planned
            notes.append(f"{run.title}: unfinished, {run.rollouts} of {planned} rollouts.")
        elif run.status == "failed":
            last = (run.error or "no reason was recorded").strip().splitlines()[-1]
            notes.append(f"{run.title}: failed after {run.rollouts} rollouts: {last}")
        notes += [f"{run.title}: {remark}." for remark in run.remarks]
    for what, plural in METRICS["must_agree"].items():
        counts = Counter(str(run.about[what]) for run in runs if what in run.about)
        if len(counts) > 1:
            values = ", ".join(f"{value} ({counted(count, 'run')})" for value, count in sorted(counts.items()))
            notes.append(f"{plural} are mixed: {values}.")
    return notes


# -- one folder --------------------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Whether a folder holds one run: by its own files, or by what a bench wrote about a run that never began."""
    return any((folder / name).is_file() for name in FILES) or "seed" in (read_mapping(folder / "bench.json")[0] or {})


def read_folder(folder: Path, bench: Mapping[str, Any] | None = None) -> RunRecord | LeftOut:
    """One run.

    Args:
        folder: of the run.
        bench: ``bench.json`` of the bench that it belongs to.
    """
    bench = bench or {}
    remarks: list[str] = []
    config = _config(folder / "config.yaml", remarks)
    about = _mapping(folder / "run.json", remarks)
    place = _mapping(folder / "bench.json", remarks) if (folder / "bench.json").is_file() else {}
    records = _records(folder / "metrics.jsonl", remarks)
    method = place["method"] if isinstance(place.get("method"), str) else "+".join(objective_names(config))
    if not method:
        return LeftOut(str(folder), "neither config.yaml nor bench.json says what was trained: " + "; ".join(remarks))
    failed = place.get("status") == "failed"
    if not records and not failed:
        return LeftOut(str(folder), "no record of a rollout or evaluation: " + ("; ".join(remarks) or "empty"))
    metrics, evaluations = _split(records)
    seconds = metrics.pop("seconds/rollout", EMPTY)
    rollouts = max((int(curve[0][-1]) for curve in metrics.values()), default=0)
    spent = {"seconds": seconds, "tokens": metrics.get("response/tokens", EMPTY)}
    totals = {unit: running_total(curve, rollouts) for unit, curve in spent.items()}
    planned = setting_of(config, "optimisation.rollouts")
    done = isinstance(planned, int) and rollouts >= planned
    seed = next((value for value in (place.get("seed"), config.get("seed")) if isinstance(value, int)), None)
    if seed is None:
        remarks.append("no file says its seed; taken for seed 0")
    return RunRecord(
        bench=_text(place.get("bench")) or _text(bench.get("name")),
        setting=_text(place.get("setting")) or "default",
        method=method,
        seed=seed or 0,
        status="failed" if failed else "finished" if done else "unfinished",
        error=_text(place.get("error")),
        path=str(folder),
        config=config,
        about={**({"cpu": bench["cpu"]} if "cpu" in bench else {}), **about},
        command=_text(place.get("command")) or _text(about.get("command")),
        cpu_seconds=as_float(place.get("cpu_seconds")),
        seconds=as_float(place.get("seconds")),
        evaluations=evaluations,
        metrics=metrics,
        largest={name: highest(curve, rollouts) for name, curve in metrics.items() if "/largest" in name},
        spent={unit: total for unit, total in totals.items() if total is not None},
        baseline=_text(bench.get("baseline")),
        bench_command=_text(bench.get("command")),
        bench_about=_text(bench.get("about")) or "",
        remarks=tuple(remarks),
    )


def _mapping(path: Path, remarks: list[str], parse: Callable[[str], Any] = json.loads) -> dict[str, Any]:
    data, why = read_mapping(path, parse)
    remarks += [why] if data is None else []
    return data or {}


def _config(path: Path, remarks: list[str]) -> dict[str, Any]:
    data = _mapping(path, remarks, lambda text: Document.parse(text, path.name).data)
    objective = data.get("objective", [])
    if isinstance(objective, list) and all(isinstance(item, Mapping) for item in objective):
        return data
    remarks.append(f"objective in {path.name} is not a list of methods")
    return {}


def _records(path: Path, remarks: list[str]) -> dict[int, dict[str, Any]]:
    """Records by rollout. A run that was continued may have written one twice; the later one counts."""
    try:
        *lines, rest = read_bytes(path).split(b"\n")
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        remarks.append(f"{path.name} is missing" if missing else f"{path.name} cannot be read: {reason(error)}")
        return {}
    if rest.strip():
        remarks.append(f"the last line of {path.name} is cut off")
    records: dict[int, dict[str, Any]] = defaultdict(dict)
    damaged = 0
    for line in filter(bytes.strip, lines):
        record = read_object(line)
        rollout = record.get("rollout")
        if isinstance(rollout, int) and not isinstance(rollout, bool) and 0 <= rollout <= MOST_ROLLOUTS:
            records[rollout] |= {readable(name): value for name, value in record.items()}
        else:
            damaged += 1
    if damaged:
        remarks.append(f"{damaged} damaged line{'s' * (damaged > 1)} of {path.name}")
    if lost := gaps({0, *records}, 1):
        remarks.append(f"{path.name} lacks rollout {lost}")
    return dict(sorted(records.items()))


def _split(records: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Curve], list[dict[str, float]]]:
    """Curves, the seconds of each rollout among them, and evaluations."""
    # a count is written only where there was something to count
    counts = {name: 0 for record in records.values() for name in record if name.startswith("optimizer_steps/")}
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    evaluations: list[dict[str, float]] = []
    for rollout, record in records.items():
        values = {name: as_float(value) for name, value in {**counts, **record}.items() if name != "rollout"}
        numbers = {name: value for name, value in values.items() if value is not None}
        if evaluation := {name: rounded(value) for name, value in numbers.items() if name.startswith("eval/")}:
            evaluations.append({"rollout": rollout, **evaluation})
        for name, value in numbers.items():
            if rollout and (name == "seconds/rollout" or not name.startswith(("eval/", "seconds/"))):
                points[name].append((rollout, value))
    curves = {name: tuple(zip(*pairs, strict=True)) for name, pairs in points.items()}
    return {name: (np.array(x, np.int64), np.array(y, np.float64)) for name, (x, y) in curves.items()}, evaluations


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


# -- names -------------------------------------------------------------------------------------------------------------

#: Never part of a name: they say how a run was made, or how long it went on.
APART = (
    *("seed", "tracking", "evaluation", "task.time_limit", "task.workers"),
    *("optimisation.rollouts", "optimisation.micro_batch_size", "rollout.batch_size"),
)
#: Parts of a run that belong to its method.
OF_METHOD = ("objective", "stages")
#: Values that a name shows; where they do not tell the runs apart, all are shown.
SHOWN = 3


def told_apart(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The same runs, no two of one bench, setting, method and seed.

    Benches of one name are told apart by their folders. Runs of ``rlstab train`` are called after their methods alone:
    a setting in which they differ goes into their setting, one of a method into their method, and what is left is told
    by the folder.
    """
    named = _renamed(runs, lambda run: run.bench or "", _with_benches)
    named = _renamed(named, lambda run: (run.bench or "", run.setting, run.method), _with_settings)
    return _renamed(named, _name, _with_folders)


def _name(run: RunRecord) -> tuple[str, str, str, int]:
    return run.bench or "", run.setting, run.method, run.seed


def _renamed(
    runs: Sequence[RunRecord], key: Callable[[RunRecord], Any], rename: Callable[[list[RunRecord]], list[RunRecord]]
) -> list[RunRecord]:
    """Each group of runs that share a key renamed by itself."""
    return [run for _, group in groupby(sorted(runs, key=key), key) for run in rename(list(group))]


def _with_benches(runs: list[RunRecord]) -> list[RunRecord]:
    """Where benches of one name have the same runs, by the folder of each."""
    roots = list(dict.fromkeys(_root(run.path) for run in runs))
    if not runs[0].bench or len(roots) == 1 or len(set(map(_name, runs))) == len(runs):
        return runs
    tails = dict(zip(roots, _ends(roots), strict=True))
    return [replace(run, bench=f"{run.bench} ({tails[_root(run.path)]})") for run in runs]


def _with_folders(runs: list[RunRecord]) -> list[RunRecord]:
    if len(runs) == 1:
        return runs
    tails = _ends([run.path for run in runs])
    return [replace(run, setting=_joined(run.setting, tail)) for run, tail in zip(runs, tails, strict=True)]


def _root(path: str) -> str:
    """The results file of a run, or the folder of its bench."""
    if file := re.fullmatch(r"(.*):\d+", path):
        return file[1]
    parts = Path(path).parts
    return str(Path(path).parents[3]) if len(parts) > 4 and parts[-4] == "runs" else path


def _with_settings(runs: list[RunRecord]) -> list[RunRecord]:
    """Those of no bench by the settings in which they differ, of those that all of them have."""
    if runs[0].bench:
        return runs
    values = [dict(flat(run.config)) for run in runs]
    shared = [path for path in set.intersection(*map(set, values)) if not _within(path, APART)]
    differ = sorted(path for path in shared if len({repr(own[path]) for own in values}) > 1)
    if "stages" in differ:  # only the stages that not all of them have tell anything
        stages = [str(own["stages"]).split(JOINED) for own in values]
        everywhere = set.intersection(*map(set, stages))
        for own, names in zip(values, stages, strict=True):
            own["stages"] = JOINED.join(name for name in names if name not in everywhere) or "none"
    of_method = [path for path in differ if _within(path, OF_METHOD)]
    methods = [f" ({label})" if label else "" for label in _labels(values, of_method)]
    settings = _labels(values, [path for path in differ if path not in of_method])
    return [
        replace(run, method=run.method + method, setting=_joined(run.setting, label))
        for run, method, label in zip(runs, methods, settings, strict=True)
    ]


def _labels(values: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> list[str]:
    """``lr=1e-4, epochs=2`` of each run; empty where nothing differs."""
    last = [path.rpartition(".")[2] for path in paths]
    names = [name if last.count(name) == 1 else path for name, path in zip(last, paths, strict=True)]

    def labels(count: int) -> list[str]:
        pairs = list(zip(names, paths, strict=True))[:count]
        return [", ".join(f"{name}={_shown(own[path])}" for name, path in pairs) for own in values]

    distinct = len({repr([own[path] for path in paths]) for own in values})
    few = labels(SHOWN)
    return few if len(set(few)) == distinct else labels(len(paths))


def _shown(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return setting(value)
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def _joined(name: str, label: str) -> str:
    if not label:
        return name
    return label if name == "default" else f"{name}, {label}"


def _within(path: str, parts: Sequence[str]) -> bool:
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def _ends(paths: Sequence[str]) -> list[str]:
    """What tells paths apart: those below the last folder that holds them all."""
    whole = [Path(path).absolute() for path in paths]
    common = os.path.commonpath(whole)
    return [str(path.relative_to(common)) for path in whole]
