"""What a trainer left under a path: its log, and the optimizer steps that were recorded."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlstab.bins import Run
from rlstab.errors import ReportError
from rlstab.files import is_dir, is_file
from rlstab.logs import source
from rlstab.logs.log import Rows
from rlstab.logs.readers import read_text
from rlstab.look.finding import Look
from rlstab.record.files import dumped, folder_of, token_files
from rlstab.report.load import find_runs
from rlstab.report.runs import RunRecord
from rlstab.run_files import DUMP, METRICS
from rlstab.safe_read import read_object, text_of

if TYPE_CHECKING:
    from rlstab.record import Dump

#: In place of a path: the text that is piped in.
STANDARD_INPUT = Path("-")
#: Endings of log files, when no path was given; those of files that are not text.
LOGS, BINARY = (".csv", ".jsonl", ".log", ".wandb", ".db"), (".db", ".wandb")
#: Number of lines that are searched for one that identifies the writer: the first may be damaged.
SNIFFED = 20
#: Characters of a file that are searched for the names of tensors by token.
SNIFFED_CHARACTERS = 10_000
#: How a run records its optimizer steps, by what wrote its log.
RECORDS = {
    "rlstab": "tracking.dump_every: 10",
    "TRL": 'trainer.add_callback(DumpCallback(trainer, "dump")), from rlstab.adapters.trl',
    "verl": "RLSTAB_DUMP=FOLDER in the environment of the workers, with an objective in the adapter",
}


def find(path: Path) -> list[Look]:
    """Every run under a path.

    Raises:
        ReportError: nothing there can be read.
    """
    pasted = path == STANDARD_INPUT
    try:
        logs = _pasted() if pasted else read_logs(path)
        runs = [Look(path if pasted or len(logs) == 1 else Path(log.path), log) for log in logs]
    except ReportError as refusal:
        if pasted:
            raise
        runs = [Look(path, None) if _dumps(path) else Look(path, None, _export(path, refusal), path)]
    for run in runs:
        _add_dump(run)
    return runs


def read_logs(path: str | Path) -> list[Run]:
    """Every run that rlstab, or any known trainer or tracker, logged under a path, under rlstab's names.

    Raises:
        ReportError: the path does not exist, or holds no log with a known metric.
    """
    path = Path(path)
    if is_dir(path) and not source.log_files(path)["TRL"]:
        with suppress(ReportError):
            return _own(path)
    return _own(path) if is_file(path) and _is_results(path) else source.read_logs(path)


def _is_results(path: Path) -> bool:
    """Whether a file is a results file of rlstab."""
    if path.suffix.lower() in BINARY or ".tfevents." in path.name:
        return False
    lines = source.text_at(path).split("\n", SNIFFED)[:SNIFFED]
    data = next(filter(None, map(read_object, lines)), {})
    return "curves" in data and "format" in data


def _own(path: Path) -> list[Run]:
    """Run folders, bench folders, results files."""
    runs, left_out = find_runs(path)
    logs = list(map(_under_names, runs))
    if left_out and logs:
        # what is left out belongs to no run; the first run reports it
        remarks = tuple(f"left out {item.path}: {item.why}" for item in left_out)
        logs[0] = replace(logs[0], remarks=(*logs[0].remarks, *remarks))
    return logs


def _under_names(run: RunRecord) -> Run:
    """A run of rlstab, with the metrics that other trainers log and rlstab has in parts."""
    rows = Rows(unit="rollout")
    for name, (rollouts, values) in run.metrics.items():
        for rollout, value in zip(rollouts.tolist(), values.tolist(), strict=True):
            rows.setdefault(rollout, {})[name] = value
    path = run.path if run.bench is None else f"{run.path} ({run.title})"
    fields = ("bin_width", "largest", "evaluations", "judged", "config")
    return replace(rows.run(path, "rlstab", run.remarks), **{name: getattr(run, name) for name in fields})


def _pasted() -> list[Run]:
    """The runs in text that was piped in, or pasted into the terminal."""
    if sys.stdin.isatty():
        print("Paste a log, and end it with Ctrl-D on a line of its own.", file=sys.stderr)
    return read_text(Path("standard input"), text_of(sys.stdin.buffer.read()))


def _read(path: Path) -> Dump:
    from rlstab.record import read_dump  # imports torch, which a log does without

    return read_dump(path)


def _export(path: Path, refusal: ReportError) -> Dump:
    """What another trainer wrote of its tokens; if nothing can be read, the error is that of the likelier kind."""
    try:
        return _read(path)
    except ReportError as error:
        raise error if _tokens_in(path) else refusal from None


def _dumps(path: Path) -> list[Path]:
    """The folders with recorded optimizer steps: the path, its ``dump``, or folders in it."""
    if dumped(path if is_file(path) else folder_of(path)):
        return [path]
    return [inner for inner in sorted(path.iterdir()) if is_dir(inner) and dumped(inner)] if is_dir(path) else []


def _tokens_in(path: Path) -> bool:
    """Whether a path that cannot be read should hold tokens rather than a log."""
    if is_dir(path):
        return bool(token_files(path)) or is_file(path / "tokens.jsonl")
    if path.suffix in (".pt", ".safetensors") or path.name == "tokens.jsonl" or path in token_files(path.parent):
        return True
    head = source.text_at(path)[:SNIFFED_CHARACTERS] if path.suffix in (".json", ".jsonl") else ""
    return any(f'"{name}"' in head for name in ("token_ids", "token_loss_mask", "input", "sha256"))


def _add_dump(run: Look) -> None:
    """Read the recorded optimizer steps of a run; without a log they are its log."""
    dumps = _dumps(run.path)
    for path in dumps[:1]:
        try:
            run.dump, run.dump_path = _read(path), path
        except ReportError as error:
            run.notes.append(str(error).splitlines()[0])
    if len(dumps) > 1:
        run.notes.append(f"Other dumps are not looked at: {', '.join(map(str, dumps[1:]))}.")
    if run.log is None and run.dump is not None:
        from rlstab.look.tokens_log import tokens_log

        run.log = tokens_log(run.dump, str(run.path))
        run.notes.append("No log was found, so the signs are read only from the recorded optimizer steps.")
    if run.dump is None and run.log is not None:
        hint = f" Next time: {RECORDS[run.log.writer]}." if run.log.writer in RECORDS else ""
        run.notes.append(
            f"No optimizer step was recorded, so nothing can be said about its loss, its sampler or its tokens.{hint}"
        )


def nearest(folder: Path) -> tuple[list[Look], list[Path]]:
    """The newest run in a folder or its subfolders, and what else can be examined.

    Raises:
        ReportError: nothing there can be read.
    """
    paths = candidates(folder)
    for index, path in enumerate(paths):
        with suppress(ReportError):
            return find(path), paths[:index] + paths[index + 1 :]
    raise ReportError(
        "Nothing in this folder can be examined. Give a run folder, the output folder of TRL, a log of verl, a CSV of "
        "wandb, or a dump; examples/dump-smollm2 is one."
    )


def candidates(folder: Path) -> list[Path]:
    """What can be examined in a folder or its subfolders, the newest first."""
    paths = [folder] if _holds(folder) else []
    if not paths:
        inner = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        paths = list(filter(_holds, inner))
        deeper = (path for entry in inner if is_dir(entry) and entry not in paths for path in entry.iterdir())
        paths += [path for path in deeper if is_dir(path) and _holds(path)]
    return sorted(paths, key=lambda entry: -entry.stat().st_mtime)


def _holds(path: Path) -> bool:
    """Whether a path looks like a run; lines of JSON may be anything, so a folder is not taken for its files."""
    if not is_dir(path):
        return path.suffix.lower() in LOGS and path.is_file()
    names = (METRICS, f"{DUMP}/step-*", "step-*.json")
    logs = (files for writer, files in source.log_files(path).items() if writer != "verl")
    return any(any(path.glob(name)) for name in names) or any(logs)
