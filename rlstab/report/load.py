"""Find and read runs in any state: bench folders, run folders, folders of them, results files."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstab.bins import EMPTY, MOST_ROLLOUTS, Curve, in_bins, rounded
from rlstab.config.document import Document
from rlstab.config.identity import is_measured, is_neutral
from rlstab.config.user_code import portable
from rlstab.console import counted
from rlstab.errors import ReportError, reason
from rlstab.files import is_dir, is_file
from rlstab.logs.run import Logged, read_foreign
from rlstab.report.formatting import METRICS, natural, setting
from rlstab.report.results_file import read_results
from rlstab.report.runs import (
    JOINED,
    LeftOut,
    Loaded,
    RunRecord,
    Status,
    flat,
    objective_names,
    running_total,
    setting_of,
)
from rlstab.run_files import ABOUT, CHECKPOINTS, CONFIG, OUT
from rlstab.run_files import METRICS as RECORDS
from rlstab.safe_read import (
    MOST_NUMBER,
    as_float,
    as_step,
    gaps,
    read_bytes,
    read_mapping,
    read_object,
    read_text,
    readable,
)

#: A folder with any of these files is a run folder.
_FILES = (RECORDS, CONFIG, ABOUT)

#: Runs are searched this many folders deep.
DEPTH = 12

#: No bench names more runs: a file that does is damaged.
MOST_RUNS = 100_000


def load_runs(*paths: str | Path, methods: Mapping[str, str] | None = None) -> Loaded:
    """Everything usable under some paths; what is left out has a reason.

    Args:
        paths: bench folders, run folders, folders of such, and results files (``.jsonl``).
        methods: by the name of a method, a pattern of the folders of its runs, of rlstab or of another trainer.

    Raises:
        ReportError: a path does not exist, no folder matches a pattern, or nothing usable is there at all.
    """
    every, left_out, benches = _search(paths, methods or {})
    kept, copies = _without_copies(every)
    runs = sorted(told_apart(kept), key=lambda run: (run.bench or "", *_name(run)[1:]))
    behind = [
        f"{name}: {missing} of the {counted(total, 'run')} that its bench.yaml names "
        f"{'has' if missing == 1 else 'have'} not begun."
        for name, (missing, total) in benches.planned.items()
    ]
    not_begun = sum(missing for missing, _ in benches.planned.values())
    notes = [*behind, *_mixed(kept), *_notes(runs)]
    return Loaded(runs, [*left_out, *copies], notes, not_begun, benches.order)


def find_runs(*paths: str | Path) -> tuple[list[RunRecord], list[LeftOut]]:
    """Every run under some paths as it is there, by path and under its own name, and what is left out.

    Raises:
        ReportError: see :func:`load_runs`.
    """
    runs, left_out, _ = _search(paths, {})
    return sorted({run.path: run for run, _ in runs}.values(), key=lambda run: natural(run.path)), left_out


@dataclass
class _Benches:
    """What the files of benches say.

    Attributes:
        planned: by bench, the number of missing runs, and the number that its file names.
        order: by bench and setting, the position of the setting in the file.
    """

    planned: dict[str, tuple[int, int]] = field(default_factory=dict)
    order: dict[tuple[str, str], int] = field(default_factory=dict)


def _search(
    paths: Sequence[str | Path], methods: Mapping[str, str]
) -> tuple[list[tuple[RunRecord, str]], list[LeftOut], _Benches]:
    """Runs with the path of each, what is left out, and what the files of benches say."""
    if not paths and not methods:
        raise ReportError("no runs were named. Give bench folders, run folders or results files (.jsonl).")
    items: list[tuple[RunRecord | LeftOut, str]] = []
    benches = _Benches()
    for path in map(Path, paths):
        if is_dir(path):
            records = list(_walk(path, benches, set())) or [
                LeftOut(str(path), "holds no run: no metrics.jsonl, config.yaml or run.json below it")
            ]
        elif is_file(path):
            records = read_results(path)
        else:
            raise ReportError(f"{path}: no such file or folder. Give bench folders, run folders or results files.")
        items += [(record, str(path)) for record in records]
    for method, pattern in methods.items():
        items += [(record, pattern) for record in _matching(method, pattern)]
    runs = [(record, path) for record, path in items if isinstance(record, RunRecord)]
    left_out = [record for record, _ in items if isinstance(record, LeftOut)]
    if not runs:
        reasons = "\n".join(f"  {item.path}: {item.why}" for item in left_out)
        raise ReportError(f"no usable run.\n{reasons}\nGive folders written by `rlstab train` or `rlstab bench`.")
    return runs, left_out, benches


def _walk(
    folder: Path, benches: _Benches, seen: set[str], bench: Mapping[str, Any] | None = None, depth: int = DEPTH
) -> Iterator[RunRecord | LeftOut]:
    """Runs in a folder and below it, through links too; no folder is read twice."""
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    if is_run(folder):
        yield read_folder(folder, bench)
        if _is_launched(folder):  # a trainer's own files in its folder are not runs
            return
        own = bench
    elif own := read_mapping(folder / "bench.json")[0] or bench:
        settings, named = _named(folder)
        name = str(own.get("name") or folder)
        benches.order |= {(name, setting): number for number, setting in enumerate(settings)}
        if missing := sum(not is_run(run) for run in named):
            benches.planned[name] = (missing, len(named))
    try:
        inside = sorted(folder.iterdir(), key=lambda path: (path.is_symlink(), path.name))
    except OSError as error:
        yield LeftOut(str(folder), f"cannot be read: {error.strerror or error}")
        return
    for path in inside:
        if path.name.startswith(".") or (path.name == CHECKPOINTS and is_run(folder)):
            continue
        if path.is_symlink() and not path.exists():
            yield LeftOut(str(path), "is a broken link")
        elif depth and path.is_dir():
            yield from _walk(path, benches, seen, own, depth - 1)
        elif path.is_dir():
            yield LeftOut(str(path), f"lies more than {DEPTH} folders deep, and was not searched")


def _named(folder: Path) -> tuple[list[str], list[Path]]:
    """Settings and folders of all runs that the file of a bench names; none if it is missing or damaged."""
    try:
        data = Document.parse(read_text(folder / "bench.yaml"), "bench.yaml").data
        settings, methods, seeds = (list(data[key]) for key in ("settings", "methods", "seeds"))
        if len(settings) * len(methods) * len(seeds) > MOST_RUNS:
            return [], []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return [], []
    names = product(settings, methods, seeds)
    folders = [folder / "runs" / str(setting) / str(method) / f"seed-{seed}" for setting, method, seed in names]
    return list(map(str, settings)), folders


def _without_copies(runs: Sequence[tuple[RunRecord, str]]) -> tuple[list[RunRecord], list[LeftOut]]:
    """Of several copies of a run, keep the finished one, then the newer; one line for each source.

    Different runs with the same name all stay; see :func:`told_apart`.
    """
    groups: dict[tuple[object, ...], list[tuple[RunRecord, str]]] = defaultdict(list)
    for run, source in sorted(runs, key=lambda pair: natural(pair[0].path)):
        groups[(run.bench, run.seed, str(run.about["run_id"])) if "run_id" in run.about else (run.path,)].append(
            (run, source)
        )
    copies: dict[tuple[str, str], list[str]] = defaultdict(list)
    kept: list[RunRecord] = []
    for some in groups.values():
        # a results file is written after its runs, and holds less than their folders
        best, _ = max(some, key=lambda pair: (pair[0].status == "finished", pair[0].bin_width == 1, pair[0].written))
        kept.append(best)
        for run, source in some:
            if run.path != best.path:
                why = "finished" if run.status != best.status == "finished" else "newer"
                copies[source, why].append(f"{run.title} in {run.path} is also in {best.path}")
    return kept, [
        LeftOut(source, f"{counted(len(some), 'run')} read twice: {some[0]}; the {why} one is kept")
        for (source, why), some in copies.items()
    ]


def _mixed(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Sentences about runs of one method in one setting of a bench that were made or evaluated differently."""
    groups: dict[tuple[str, str], dict[str, list[RunRecord]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.bench:
            groups[run.bench, run.setting][run.method].append(run)
    kinds = {False: "made with different settings, and are kept apart", True: "evaluated with different settings"}
    for (bench, group), methods in groups.items():
        for measured, what in kinds.items():
            values: dict[str, Counter[str]] = defaultdict(Counter)
            for some in methods.values():
                for path, each in settings_between(some, method=True).items():
                    if is_measured(path) is measured:
                        values[path].update(map(shown, each))
            told = "; ".join(
                f"{path} " + ", ".join(f"{value} ({counted(count, 'run')})" for value, count in counts.items())
                for path, counts in values.items()
            )
            if told:
                yield f"{bench}, {group}: runs of one method were {what}: {told}."


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


#: The number of a seed in the name of a folder: ``seed-3``, ``seed_3``, ``s3``, or the last number of all.
_SEED = re.compile(r"(?i)(?:seed[-_=]?|(?<![a-z])s)(\d{1,9})(?!\d)")


def _matching(method: str, pattern: str) -> Iterator[RunRecord | LeftOut]:
    """The runs of a method in the folders that match a pattern, each with the seed in its name."""
    folders = [Path(path) for path in sorted(glob(pattern), key=natural) if is_dir(path)]  # noqa: PTH207  # may be absolute
    if not folders:
        raise ReportError(f"--method {method}={pattern}: no folder matches. Put the pattern in quotes, with * for any.")
    tails = _ends(list(map(str, folders))) if len(folders) > 1 else [folders[0].name]
    told = [_SEED.findall(tail) or re.findall(r"(\d{1,9})(?!.*\d)", tail) for tail in tails]
    seeds = [int(numbers[-1]) for numbers in told if numbers]
    by_name = len(set(seeds)) == len(folders)
    for index, folder in enumerate(folders):
        seed, remark = (seeds[index], ()) if by_name else (index, ("no seed is in its name; taken by its order",))
        if is_run(folder):
            run = read_folder(folder)
            yield replace(run, bench=None, setting="default", method=method) if isinstance(run, RunRecord) else run
            continue
        try:
            logged = read_foreign(folder, folder / "worker.log")
        except ReportError as error:
            yield LeftOut(str(folder), str(error))
            continue
        yield RunRecord(
            **logged.facts,
            bench=None,
            setting="default",
            method=method,
            seed=seed,
            path=str(folder),
            status="unfinished" if logged.ended is False else "finished",
            written=_written(folder),
            remarks=(*remark, *logged.remarks),
        )


# -- one folder --------------------------------------------------------------------------------------------------------


def is_run(folder: Path) -> bool:
    """Whether a folder holds one run, by its own files or by what a bench wrote about a run that never began."""
    return any((folder / name).is_file() for name in _FILES) or "seed" in (read_mapping(folder / "bench.json")[0] or {})


def read_folder(folder: Path, bench: Mapping[str, Any] | None = None) -> RunRecord | LeftOut:
    """One run.

    Args:
        folder: of the run.
        bench: ``bench.json`` of the bench that it belongs to.
    """
    bench = bench or {}
    remarks: list[str] = []
    launched = _is_launched(folder)
    config = _config(folder / CONFIG, remarks)
    place = _mapping(folder / "bench.json", remarks) if (folder / "bench.json").is_file() else {}
    about = {"run_hash": place.get("run_hash")} if launched else _mapping(folder / ABOUT, remarks)
    method = place["method"] if isinstance(place.get("method"), str) else "+".join(objective_names(config))
    if not method:
        return LeftOut(str(folder), "neither config.yaml nor bench.json says what was trained: " + "; ".join(remarks))
    status: Status | None = "failed" if place.get("status") == "failed" else None
    if launched:
        try:
            logged = read_foreign(folder / OUT, folder / "worker.log")
        except ReportError as error:
            if status is None:
                return LeftOut(str(folder), str(error))
            logged = Logged(dict[str, Any](metrics={}, evaluations=[]), None, ())
        status = status or ("finished" if place.get("status") == "finished" else "unfinished")
    else:
        logged = _own(folder, config, remarks)
        if not logged.facts["metrics"] and not logged.facts["evaluations"] and status is None:
            return LeftOut(str(folder), "no record of a rollout or evaluation: " + ("; ".join(remarks) or "empty"))
    seed = as_step(place.get("seed", config.get("seed")))
    if seed is None:
        remarks.append("no file says its seed; taken for seed 0")
    return RunRecord(
        **logged.facts,
        written=_written(folder),
        bench=_text(place.get("bench")) or _text(bench.get("name")),
        setting=_text(place.get("setting")) or "default",
        method=method,
        seed=seed or 0,
        status=status or ("finished" if logged.ended else "unfinished"),
        error=_text(place.get("error")),
        path=str(folder),
        config=config,
        about={**({"cpu": bench["cpu"]} if "cpu" in bench else {}), **about},
        command=_text(place.get("command")) or _text(about.get("command")),
        cpu_seconds=as_float(place.get("cpu_seconds")),
        seconds=as_float(place.get("seconds")),
        baseline=_text(bench.get("baseline")),
        bench_command=_text(bench.get("command")),
        bench_about=_text(bench.get("about")) or "",
        collapse=bench["collapse"] if isinstance(bench.get("collapse"), dict) else None,
        remarks=(*remarks, *logged.remarks),
    )


def _is_launched(folder: Path) -> bool:
    """Whether a bench made the run by the command of another trainer."""
    return (folder / OUT).is_dir() and not (folder / RECORDS).is_file()


def _written(folder: Path) -> float:
    file = folder / RECORDS
    return file.stat().st_mtime if file.is_file() else folder.stat().st_mtime


def _own(folder: Path, config: Mapping[str, Any], remarks: list[str]) -> Logged:
    """The run that rlstab's trainer wrote."""
    metrics, evaluations = _split(_records(folder / RECORDS, remarks))
    seconds = metrics.pop("seconds/rollout", EMPTY)
    rollouts = max((int(curve[0][-1]) for curve in metrics.values()), default=0)
    spent = {"seconds": seconds, "tokens": metrics.get("response/tokens", EMPTY)}
    totals = {unit: running_total(curve, rollouts) for unit, curve in spent.items()}
    planned = setting_of(config, "optimisation.rollouts")
    facts = {
        "metrics": metrics,
        "evaluations": evaluations,
        "largest": {name: in_bins(metrics[name], rollouts, largest=True) for name in metrics if "/largest" in name},
        "spent": {unit: total for unit, total in totals.items() if total is not None},
    }
    return Logged(facts, isinstance(planned, int) and rollouts >= planned, ())


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
    records: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in filter(bytes.strip, lines):
        record = read_object(line)
        rollout = record.get("rollout")
        if isinstance(rollout, int) and not isinstance(rollout, bool) and 0 <= rollout <= MOST_ROLLOUTS:
            if not line.isascii() or b"\\u" in line:
                record = {readable(name): value for name, value in record.items()}
            records[rollout] = {**records[rollout], **record} if rollout in records else record
        else:
            damaged += 1
    if damaged:
        remarks.append(f"{damaged} damaged line{'s' * (damaged > 1)} of {path.name}")
    if lost := gaps({0, *records}, 1):
        remarks.append(f"{path.name} lacks rollout {lost}")
    return dict(sorted(records.items()))


def _split(records: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, Curve], list[dict[str, float]]]:
    """Curves, with the seconds of each rollout, and evaluations."""
    steps = np.array(list(records), np.int64)
    grids: dict[bytes, NDArray[np.int64]] = {}  # most metrics share one
    metrics: dict[str, Curve] = {}
    evaluations: dict[int, dict[str, float]] = {}
    for name in sorted(set[str]().union(*records.values()) - {"rollout"}):
        # a count is written only if there was something to count
        missing = 0.0 if name.startswith("optimizer_steps/") else None
        known, values = _numbers([record.get(name, missing) for record in records.values()])
        if name.startswith("eval/"):
            for rollout, value in zip(steps[known].tolist(), values[known].tolist(), strict=True):
                if math.isfinite(value):
                    evaluations.setdefault(rollout, {"rollout": rollout})[name] = rounded(value)
        elif name == "seconds/rollout" or not name.startswith("seconds/"):
            known &= steps > 0
            if known.any():
                metrics[name] = grids.setdefault(known.tobytes(), steps[known]), values[known]
    return metrics, [evaluations[rollout] for rollout in sorted(evaluations)]


def _numbers(column: Sequence[Any]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """The records in which a metric has a number, and the numbers; see :func:`rlstab.safe_read.as_float`."""
    if set(map(type, column)) <= {float, type(None)}:
        values = np.array(column, np.float64)
        large = np.abs(values) > MOST_NUMBER
        return np.array([value is not None for value in column]), np.where(large, np.copysign(np.inf, values), values)
    numbers = list(map(as_float, column))
    return np.array([number is not None for number in numbers]), np.array(numbers, np.float64)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


# -- names -------------------------------------------------------------------------------------------------------------

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
    return _renamed(named, _name, _with_folders)


def _name(run: RunRecord) -> tuple[str, str, str, int]:
    return run.bench or "", run.setting, run.method, run.seed


def _renamed(
    runs: Sequence[RunRecord], key: Callable[[RunRecord], Any], rename: Callable[[list[RunRecord]], list[RunRecord]]
) -> list[RunRecord]:
    """Each group of runs that share a key, renamed separately."""
    return [run for _, group in groupby(sorted(runs, key=key), key) for run in rename(list(group))]


def _with_benches(runs: list[RunRecord]) -> list[RunRecord]:
    """If benches of one name have the same runs, they are told apart by their folders."""
    roots = list(dict.fromkeys(_root(run.path) for run in runs))
    if not runs[0].bench or len(roots) == 1 or len(set(map(_name, runs))) == len(runs):
        return runs
    tails = dict(zip(roots, _ends(roots), strict=True))
    return [replace(run, bench=f"{run.bench} ({tails[_root(run.path)]})") for run in runs]


def _with_folders(runs: list[RunRecord]) -> list[RunRecord]:
    if len(runs) == 1:
        return runs
    tails = _ends([run.path for run in runs])
    return [
        replace(run, setting=_joined(run.setting, tail), repeats=run.setting)
        for run, tail in zip(runs, tails, strict=True)
    ]


def _root(path: str) -> str:
    """The results file of a run, or the folder of its bench."""
    if file := re.fullmatch(r"(.*):\d+", path):
        return file[1]
    parts = Path(path).parts
    return str(Path(path).parents[3]) if len(parts) > 4 and parts[-4] == "runs" else path


def _with_settings(runs: list[RunRecord]) -> list[RunRecord]:
    """Runs of one setting by the settings in which those of one method differ."""
    methods: dict[str, list[RunRecord]] = defaultdict(list)
    for run in runs:
        methods[run.method].append(run)
    of_methods = {name: settings_between(some, method=True).keys() for name, some in methods.items()}
    differ = sorted({path for paths in of_methods.values() for path in paths if not is_measured(path)})
    if not differ:
        return runs
    known = [run for run in runs if run.config]
    flats = map(_flat, known)
    values = [{path: _value(every, path) for path in differ} for every in flats]
    if "stages" in differ:  # only stages that some of them lack are informative
        stages = [str(value["stages"]).split(JOINED) for value in values]
        everywhere = set.intersection(*map(set, stages))
        for value, names in zip(values, stages, strict=True):
            value["stages"] = JOINED.join(name for name in names if name not in everywhere) or "none"
    of_method = [path for path in differ if _within(path, OF_METHOD)]
    labels = [f" ({label})" for label in _labels(values, of_method)]
    settings = _labels(values, [path for path in differ if path not in of_method])
    named = [
        replace(
            run,
            method=run.method + (label if of_methods[run.method] & {*of_method} else ""),
            setting=_joined(run.setting, setting),
        )
        for run, label, setting in zip(known, labels, settings, strict=True)
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
    known = [run for run in runs if run.config]
    if len(known) < 2 or all(
        (run.config, run.about.get("code")) == (known[0].config, known[0].about.get("code")) for run in known
    ):
        return {}
    differ = {}
    flats = [_flat(run) for run in known]
    for path in sorted(set().union(*flats)):
        values = [_value(every, path) for every in flats]
        counts = path != "seed" and (method or not _within(path, OF_METHOD)) and _MISSING not in values
        counts = counts and (is_measured(path) or not all(is_neutral(path, every) for every in flats))
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
    inside = {key.removeprefix(f"{path}."): value for key, value in values.items() if key.startswith(f"{path}.")}
    return ", ".join(f"{key}={shown(value)}" for key, value in inside.items()) if inside else _MISSING


def _labels(values: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> list[str]:
    """``lr=1e-4, epochs=2`` for each run; empty if nothing differs."""
    last = [path.rpartition(".")[2] for path in paths]
    names = [name if last.count(name) == 1 else path for name, path in zip(last, paths, strict=True)]

    def labels(count: int) -> list[str]:
        pairs = list(zip(names, paths, strict=True))[:count]
        return [", ".join(f"{name}={shown(value[path])}" for name, path in pairs) for value in values]

    distinct = len({repr([value[path] for path in paths]) for value in values})
    few = labels(SHOWN)
    return few if len(set(few)) == distinct else labels(len(paths))


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


def _ends(paths: Sequence[str]) -> list[str]:
    """Paths relative to the last folder that holds them all."""
    whole = [Path(path).absolute() for path in paths]
    common = os.path.commonpath(whole)
    return [str(path.relative_to(common)) for path in whole]
