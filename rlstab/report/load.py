"""Find and read runs in any state: bench folders, run folders, folders of them, results files."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import glob
from itertools import product
from pathlib import Path
from typing import Any

from rlstab.config.allowed_changes import is_measured
from rlstab.config.document import Document
from rlstab.console import counted
from rlstab.errors import ReportError
from rlstab.files import is_dir, is_file
from rlstab.report.formatting import METRICS, natural
from rlstab.report.names import name_of, settings_between, shown, tails_of, told_apart
from rlstab.report.results_file import read_results
from rlstab.report.run_reader import foreign, is_launched, read_folder, record_of
from rlstab.report.runs import LeftOut, Loaded, RunRecord, grouped
from rlstab.run_files import CHECKPOINTS, OF_A_RUN
from rlstab.safe_read import read_mapping, read_text

#: Runs are searched this many folders deep.
DEPTH = 12

#: No bench names more runs: a file that does is damaged.
MOST_RUNS = 100_000


def load_runs(*paths: str | Path, methods: Mapping[str, str] | None = None) -> Loaded:
    """Everything usable under some paths; what is left out has a reason.

    Args:
        paths: bench folders, run folders, folders of such, and results files (``.jsonl``).
        methods: a pattern of the folders of its runs for each method, of rlstab or of another trainer.

    Raises:
        ReportError: a path does not exist, no folder matches a pattern, or nothing usable is there at all.
    """
    found_runs, left_out, benches = _search(paths, methods or {})
    unique, copies = _without_copies(found_runs)
    runs = sorted(told_apart(unique), key=lambda run: (run.bench or "", *name_of(run)[1:]))
    behind = [
        f"{name}: {missing} of the {counted(total, 'run')} that its bench.yaml names "
        f"{'has' if missing == 1 else 'have'} not begun."
        for name, (missing, total) in benches.planned.items()
    ]
    not_begun = sum(missing for missing, _ in benches.planned.values())
    notes = [*behind, *_mixed(unique), *_notes(runs)]
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
        planned: the number of missing runs, and the number that the file names, by bench.
        order: the position of a setting in the file of its bench, by bench and setting.
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
        if is_launched(folder):  # a trainer's own files in its folder are not runs
            return
        bench_record = bench
    elif bench_record := read_mapping(folder / "bench.json")[0] or bench:
        settings, named = _named(folder)
        name = str(bench_record.get("name") or folder)
        benches.order |= {(name, setting): number for number, setting in enumerate(settings)}
        if missing := sum(not is_run(run) for run in named):
            benches.planned[name] = (missing, len(named))
    try:
        paths = sorted(folder.iterdir(), key=lambda path: (path.is_symlink(), path.name))
    except OSError as error:
        yield LeftOut(str(folder), f"cannot be read: {error.strerror or error}")
        return
    for path in paths:
        if path.name.startswith(".") or (path.name == CHECKPOINTS and is_run(folder)):
            continue
        if path.is_symlink() and not path.exists():
            yield LeftOut(str(path), "is a broken link")
        elif depth and path.is_dir():
            yield from _walk(path, benches, seen, bench_record, depth - 1)
        elif path.is_dir():
            yield LeftOut(str(path), f"lies more than {DEPTH} folders deep, and was not searched")


def is_run(folder: Path) -> bool:
    """Whether a folder holds one run, by its own files or by what a bench wrote about a run that never began."""
    logged = any((folder / name).is_file() for name in OF_A_RUN)
    return logged or "seed" in (read_mapping(folder / "bench.json")[0] or {})


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

    def identity(pair: tuple[RunRecord, str]) -> tuple[object, ...]:
        run, _ = pair
        return (run.bench, run.seed, str(run.about["run_id"])) if "run_id" in run.about else (run.path,)

    groups = grouped(sorted(runs, key=lambda pair: natural(pair[0].path)), identity)
    copies: dict[tuple[str, str], list[str]] = defaultdict(list)
    unique: list[RunRecord] = []
    for group in groups.values():
        # a results file is written after its runs, and holds less than their folders
        best, _ = max(group, key=lambda pair: (pair[0].status == "finished", pair[0].bin_width == 1, pair[0].written))
        unique.append(best)
        for run, source in group:
            if run.path != best.path:
                reason = "finished" if run.status != best.status == "finished" else "newer"
                copies[source, reason].append(f"{run.title} in {run.path} is also in {best.path}")
    return unique, [
        LeftOut(source, f"{counted(len(group), 'run')} read twice: {group[0]}; the {reason} one is kept")
        for (source, reason), group in copies.items()
    ]


def _mixed(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Sentences about runs of one method in one setting of a bench that were made or evaluated differently."""
    groups: dict[tuple[str, str], dict[str, list[RunRecord]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run.bench:
            groups[run.bench, run.setting][run.method].append(run)
    kinds = {False: "made with different settings, and are kept apart", True: "evaluated with different settings"}
    for (bench, group), methods in groups.items():
        for measured, difference in kinds.items():
            values: dict[str, Counter[str]] = defaultdict(Counter)
            for runs_of_method in methods.values():
                for path, values_of_path in settings_between(runs_of_method, method=True).items():
                    if is_measured(path) is measured:
                        values[path].update(map(shown, values_of_path))
            differences = "; ".join(
                f"{path} " + ", ".join(f"{value} ({counted(count, 'run')})" for value, count in counts.items())
                for path, counts in values.items()
            )
            if differences:
                yield f"{bench}, {group}: runs of one method were {difference}: {differences}."


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
    for entry, plural in METRICS["must_agree"].items():
        counts = Counter(str(run.about[entry]) for run in runs if entry in run.about)
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
    tails = tails_of(list(map(str, folders))) if len(folders) > 1 else [folders[0].name]
    numbers_of = [_SEED.findall(tail) or re.findall(r"(\d{1,9})(?!.*\d)", tail) for tail in tails]
    seeds = [int(numbers[-1]) for numbers in numbers_of if numbers]
    by_name = len(set(seeds)) == len(folders)
    for index, folder in enumerate(folders):
        seed, remark = (seeds[index], ()) if by_name else (index, ("no seed is in its name; taken by its order",))
        if is_run(folder):
            record = read_folder(folder)
            if isinstance(record, RunRecord):
                record = replace(record, bench=None, setting="default", method=method)
            yield record
            continue
        try:
            run = foreign(folder, folder / "worker.log")
        except ReportError as error:
            yield LeftOut(str(folder), str(error))
            continue
        status = "unfinished" if run.ended is False else "finished"
        facts = {"bench": None, "setting": "default", "method": method, "seed": seed, "status": status}
        yield record_of(run, folder, **facts, remarks=(*remark, *run.remarks))
