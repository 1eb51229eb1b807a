"""Find and read runs: bench folders, run folders, folders of them, results files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlstab.core.errors import ReportError
from rlstab.report.folder import is_run, read_folder, read_json
from rlstab.report.model import WIDTH, Curve, LeftOut, Loaded, RunRecord, Status
from rlstab.report.results import read_results

__all__ = ["WIDTH", "Curve", "LeftOut", "Loaded", "RunRecord", "Status", "load_runs"]

#: Folders below a path in which runs are looked for: OUT/runs/<setting>/<method>/seed-<k> and one around it.
DEPTH = 6

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
    if not paths:
        raise ReportError("no runs were named. Give bench folders, run folders or results files (.jsonl).")
    found: list[RunRecord | LeftOut] = []
    for path in [Path(one) for one in paths]:
        if path.is_dir():
            inside = list(_walk(path))
            found += inside or [LeftOut(str(path), "holds no run: no metrics.jsonl, config.yaml or run.json below it")]
        elif path.is_file():
            found += read_results(path)
        else:
            raise ReportError(f"{path}: no such file or folder. Give bench folders, run folders or results files.")
    left_out = [one for one in found if isinstance(one, LeftOut)]
    runs = _without_doubles([one for one in found if isinstance(one, RunRecord)], left_out)
    if not runs:
        reasons = "\n".join(f"  {one.path}: {one.why}" for one in left_out)
        raise ReportError(f"no usable run.\n{reasons}\nGive folders written by `rlstab train` or `rlstab bench`.")
    return Loaded(runs, left_out, _notes(runs))


def _walk(folder: Path, bench: Mapping[str, Any] | None = None, depth: int = DEPTH) -> Iterator[RunRecord | LeftOut]:
    if is_run(folder):
        yield read_folder(folder, bench)
        return
    bench = read_json(folder / "bench.json")[0] or bench
    if depth:
        for inside in sorted(folder.iterdir()):
            if inside.is_dir() and not inside.is_symlink() and not inside.name.startswith("."):
                yield from _walk(inside, bench, depth - 1)


def _without_doubles(runs: list[RunRecord], left_out: list[LeftOut]) -> list[RunRecord]:
    """By name; of several with one name the first by path stays."""
    kept: dict[tuple[str, str, str, int], RunRecord] = {}
    for run in sorted(runs, key=lambda one: one.path):
        name = (run.bench or "", run.setting, run.method, run.seed)
        first = kept.setdefault(name, run)
        if first is not run and first.path != run.path:
            same = " and so is its hash" if _hash(first) and _hash(first) == _hash(run) else ""
            left_out.append(
                LeftOut(run.path, f"its name ({run.title}) is that of {first.path}{same}; the first by path is kept")
            )
    return [kept[name] for name in sorted(kept)]


def _hash(run: RunRecord) -> object:
    return run.about.get("run_hash")


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
            listed = ", ".join(f"{value} ({count} runs)" for value, count in sorted(counts.items()))
            notes.append(f"{plural} are mixed: {listed}.")
    return notes
