"""What a trainer left under a path: its log, and the optimizer steps that were recorded."""

import sys
from contextlib import suppress
from pathlib import Path

from rlstab.bins import Run
from rlstab.dump_files import dump_folders, token_files
from rlstab.errors import ReportError
from rlstab.files import is_dir, is_file
from rlstab.logs import source
from rlstab.logs.log import known_part
from rlstab.logs.readers import read_text
from rlstab.look.diagnosis import diagnose
from rlstab.look.finding import Look
from rlstab.report.load import find_runs
from rlstab.run_files import DUMP, METRICS
from rlstab.safe_read import read_object, text_of

#: In place of a path: the text that is piped in.
STANDARD_INPUT = Path("-")
#: Endings of log files, when no path was given.
LOGS = (".csv", ".jsonl", ".log", ".wandb", ".db")
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
    """Every run under a path, with its recorded optimizer steps; without a log these are its log.

    Raises:
        ReportError: nothing there can be read.
    """
    pasted, refusal, logs = path == STANDARD_INPUT, None, list[Run | None]()
    if pasted and sys.stdin.isatty():
        print("Paste a log, and end it with Ctrl-D on a line of its own.", file=sys.stderr)
    try:
        logs += read_text(Path("standard input"), text_of(sys.stdin.buffer.read())) if pasted else read_logs(path)
    except ReportError as error:
        if pasted:
            raise
        refusal, logs = error, [None]
    runs: list[Look] = []
    for log in logs:
        run_path = path if log is None or pasted or len(logs) == 1 else Path(log.path)
        dump, notes, folders = None, list[str](), dump_folders(run_path)
        for folder in folders[:1] or ([path] if refusal else []):
            from rlstab.record import read_dump  # imports torch, which a log does without

            try:
                dump = read_dump(folder)
            except ReportError as error:
                if refusal:  # the error is that of the likelier kind
                    raise error if folders or _tokens_in(path) else refusal from None
                notes.append(str(error).splitlines()[0])
        if len(folders) > 1:
            notes.append(f"Other dumps are not looked at: {', '.join(map(str, folders[1:]))}.")
        if log is None:
            from rlstab.look.tokens_log import tokens_log

            assert dump is not None
            log = tokens_log(dump, str(path))
            notes.append("No log was found, so the signs are read only from the recorded optimizer steps.")
        if dump is None:
            hint = f" Next time: {RECORDS[log.writer]}." if log.writer in RECORDS else ""
            notes.append(
                "No optimizer step was recorded, so nothing can be said about its loss, its sampler or its tokens."
                f"{hint}"
            )
        runs.append(Look(run_path, log.path, log, diagnose(log), dump, (folders or [path])[0], notes))
    return runs


def read_logs(path: str | Path) -> list[Run]:
    """Every run that rlstab, or any known trainer or tracker, logged under a path, under rlstab's names.

    Raises:
        ReportError: the path does not exist, or holds no log with a known metric.
    """
    path = Path(path)
    if not is_dir(path) and not _is_results(path):
        return source.read_logs(path)
    try:
        runs, left_out = find_runs(path)
    except ReportError:
        if is_dir(path):
            return source.read_logs(path)
        raise
    # what is left out belongs to no run; the first run reports it
    remarks = tuple(f"left out {item.path}: {item.why}" for item in left_out)
    return [
        known_part(
            run, run.path if run.bench is None else f"{run.path} ({run.title})", remarks if run is runs[0] else ()
        )
        for run in runs
    ]


def _is_results(path: Path) -> bool:
    """Whether a file is a results file, by the first line that is JSON."""
    if not is_file(path) or "text" not in source.log_files(path):
        return False
    lines = source.text_at(path).split("\n", SNIFFED)[:SNIFFED]
    return {"curves", "format"} <= next(filter(None, map(read_object, lines)), {}).keys()


def _tokens_in(path: Path) -> bool:
    """Whether a path that cannot be read should hold tokens rather than a log."""
    if is_dir(path):
        return bool(token_files(path))
    if path.suffix in (".pt", ".safetensors") or path in token_files(path.parent):
        return True
    head = source.text_at(path)[:SNIFFED_CHARACTERS] if path.suffix in (".json", ".jsonl") else ""
    return any(f'"{name}"' in head for name in ("token_ids", "token_loss_mask", "input", "sha256"))


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
