"""Find and read runs: bench folders, run folders, folders of them, results files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from os.path import commonpath
from pathlib import Path
from typing import Any

from rlstab.config.document import Document
from rlstab.errors import ReportError
from rlstab.files import is_dir, is_file
from rlstab.report.folder import is_run, read_folder, read_json
from rlstab.report.model import WIDTH, Curve, LeftOut, Loaded, RunRecord, Status
from rlstab.report.names import told_apart
from rlstab.report.numbers import counted, ranges
from rlstab.report.plain import read_text
from rlstab.report.results import read_results

__all__ = ["WIDTH", "Curve", "LeftOut", "Loaded", "RunRecord", "Status", "load_runs"]

#: Folders below a path in which runs are looked for: OUT/runs/<setting>/<method>/seed-<k> and one around it.
DEPTH = 6

#: No bench names more: beyond it its file is damaged.
MOST_RUNS = 100_000

#: Entries of run.json that should be the same in runs that are compared.
MUST_AGREE = {
    "rlstab": "Versions of rlstab",
    "torch": "Versions of torch",
    "transformers": "Versions of transformers",
    "device": "Devices",
    "machine": "Machines",
}


def load_runs(*paths: str | Path) -> Loaded:
    """Everything usable under some paths; what is not says why.

    Args:
        paths: bench folders, run folders, folders of such, and results files (``.jsonl``).

    Raises:
        ReportError: a path does not exist, or nothing usable is there at all.
    """
    planned: dict[str, tuple[int, int]] = {}
    sources: dict[RunRecord, str] = {}
    found, left_out = _read(paths, planned, sources)
    runs, doubles = _without_doubles(found, sources)
    behind = [
        f"{name}: {lacking} of the {counted(total, 'run')} that its bench.yaml names "
        f"{'has' if lacking == 1 else 'have'} not begun."
        for name, (lacking, total) in planned.items()
    ]
    lacking = sum(one for one, _ in planned.values())
    return Loaded(runs, [*left_out, *doubles], [*behind, *_notes(runs)], lacking)


def find_runs(*paths: str | Path) -> tuple[list[RunRecord], list[LeftOut]]:
    """Every run under some paths as it lies there, by path and under its own name, and what is left out.

    Raises:
        ReportError: see :func:`load_runs`.
    """
    found, left_out = _read(paths, {}, {})
    return sorted({one.path: one for one in found}.values(), key=lambda one: _natural(one.path)), left_out


def _read(
    paths: Sequence[str | Path], planned: dict[str, tuple[int, int]], sources: dict[RunRecord, str]
) -> tuple[list[RunRecord], list[LeftOut]]:
    """What is there; ``planned`` is as in :func:`_walk`, ``sources`` takes the path under which a run was found."""
    if not paths:
        raise ReportError("no runs were named. Give bench folders, run folders or results files (.jsonl).")
    found: list[RunRecord | LeftOut] = []
    for path in [Path(one) for one in paths]:
        before = len(found)
        if is_dir(path):
            inside = list(_walk(path, planned))
            found += inside or [LeftOut(str(path), "holds no run: no metrics.jsonl, config.yaml or run.json below it")]
        elif is_file(path):
            found += read_results(path)
        else:
            raise ReportError(f"{path}: no such file or folder. Give bench folders, run folders or results files.")
        sources |= {one: str(path) for one in found[before:] if isinstance(one, RunRecord)}
    runs = [one for one in found if isinstance(one, RunRecord)]
    left_out = [one for one in found if isinstance(one, LeftOut)]
    if not runs:
        reasons = "\n".join(f"  {one.path}: {one.why}" for one in left_out)
        raise ReportError(f"no usable run.\n{reasons}\nGive folders written by `rlstab train` or `rlstab bench`.")
    return runs, left_out


def _walk(
    folder: Path,
    planned: dict[str, tuple[int, int]],
    bench: Mapping[str, Any] | None = None,
    depth: int = DEPTH,
) -> Iterator[RunRecord | LeftOut]:
    """Runs below a folder; ``planned`` takes, of each bench, the runs that are not there and those that it names."""
    if is_run(folder):
        yield read_folder(folder, bench)
        return
    own = read_json(folder / "bench.json")[0]
    if own:
        named = _named(folder)
        if lacking := [one for one in named if not is_run(one)]:
            planned[str(own.get("name") or folder)] = (len(lacking), len(named))
    bench = own or bench
    if depth:
        for inside in sorted(folder.iterdir()):
            if inside.is_dir() and not inside.is_symlink() and not inside.name.startswith("."):
                yield from _walk(inside, planned, bench, depth - 1)


def _named(folder: Path) -> list[Path]:
    """Folders of all runs that the file of a bench names; none where it is not there or damaged."""
    try:
        data = Document.parse(read_text(folder / "bench.yaml"), "bench.yaml").data
        settings, methods, seeds = (list(data[key]) for key in ("settings", "methods", "seeds"))
        if len(settings) * len(methods) * len(seeds) > MOST_RUNS:
            return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [folder / "runs" / str(a) / str(b) / f"seed-{c}" for a, b, c in product(settings, methods, seeds)]


def _without_doubles(runs: list[RunRecord], sources: Mapping[RunRecord, str]) -> tuple[list[RunRecord], list[LeftOut]]:
    """Of what was read of one run from several places the first by path stays; those of one source are told together.

    Runs that only have one name are several runs, and their names are made different.
    """
    kept: list[RunRecord] = []
    known: dict[tuple[object, ...], RunRecord] = {}
    doubles: dict[str, list[tuple[RunRecord, RunRecord]]] = {}
    for run in sorted(runs, key=lambda one: _natural(one.path)):
        ids = list(_ids(run))
        first = next((known[one] for one in ids if one in known), None)
        if first is None:
            kept.append(run)
        elif first.path != run.path:
            doubles.setdefault(sources[run], []).append((first, run))
        known |= dict.fromkeys(ids, first or run)
    left = sorted(told_apart(kept), key=lambda run: (run.bench or "", run.setting, run.method, run.seed))
    return left, [_double(source, pairs) for source, pairs in doubles.items()]


def _ids(run: RunRecord) -> Iterator[tuple[object, ...]]:
    """What no other run has: its place; its id; where a version that drew no ids wrote it, its name and settings."""
    yield (run.path,)
    if "run_id" in run.about:
        yield run.bench, run.seed, str(run.about["run_id"])
    elif "run_hash" in run.about:
        yield run.bench, run.setting, run.method, run.seed, str(run.about["run_hash"])


def _double(source: str, pairs: Sequence[tuple[RunRecord, RunRecord]]) -> LeftOut:
    if len(pairs) == 1:
        first, run = pairs[0]
        return LeftOut(run.path, f"this run ({run.title}) is also in {first.path}; the first by path is kept")
    seeds: dict[str, list[int]] = {}
    for _, run in pairs:
        seeds.setdefault(" ".join([*([run.bench] if run.bench else []), run.setting, run.method]), []).append(run.seed)
    told = "; ".join(f"{name} seed{'s' * (len(own) > 1)} {ranges(own)}" for name, own in seeds.items())
    where = _common([first.path for first, _ in pairs])
    return LeftOut(source, f"{len(pairs)} runs are also in {where}; the first by path are kept: {told}")


def _common(paths: Sequence[str]) -> str:
    """The folder or file that holds all of them."""
    files = {path.rpartition(":")[0] if re.search(r":\d+$", path) else path for path in paths}
    absolute = len({Path(one).is_absolute() for one in files}) == 1
    return (commonpath(files) or ".") if absolute else "several places"


def _natural(path: str) -> list[str | int]:
    """Line 2 before line 10."""
    return [int(one) if one.isdecimal() else one for one in re.split(r"([0-9]+)", path)]


def _notes(runs: list[RunRecord]) -> list[str]:
    notes = []
    for run in runs:
        if run.status == "unfinished":
            planned = "an unknown number of" if run.planned is None else run.planned
            notes.append(f"{run.title}: unfinished, {run.rollouts} of {planned} rollouts.")
        elif run.status == "failed":
            last = (run.error or "no reason was recorded").strip().splitlines()[-1]
            notes.append(f"{run.title}: failed after {run.rollouts} rollouts: {last}")
        notes += [f"{run.title}: {remark}." for remark in run.remarks]
    for what, plural in MUST_AGREE.items():
        counts = Counter(str(run.about[what]) for run in runs if what in run.about)
        if len(counts) > 1:
            listed = ", ".join(f"{value} ({counted(count, 'run')})" for value, count in sorted(counts.items()))
            notes.append(f"{plural} are mixed: {listed}.")
    return notes
