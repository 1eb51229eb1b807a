"""What a trainer left under a path: its log, and the optimizer steps that were recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlstab.bins import Run
from rlstab.errors import ReportError
from rlstab.files import is_dir, is_file
from rlstab.logs.readers import read_text
from rlstab.logs.source import log_files, text_at
from rlstab.look.run_log import read_logs
from rlstab.record.files import dumped, folder_of, token_files
from rlstab.run_files import DUMP, METRICS
from rlstab.safe_read import text_of

if TYPE_CHECKING:
    from rlstab.record import Dump

#: In place of a path: the text that is piped in.
STANDARD_INPUT = Path("-")
#: Endings of log files, when no path was given.
LOGS = (".csv", ".jsonl", ".log", ".wandb", ".db")
#: Characters of a file that are searched for the names of tensors by token.
SNIFFED_CHARACTERS = 10_000
#: How a run records its optimizer steps, by what wrote its log.
RECORDS = {
    "rlstab": "tracking.dump_every: 10",
    "TRL": 'trainer.add_callback(DumpCallback(trainer, "dump")), from rlstab.adapters.trl',
    "verl": "RLSTAB_DUMP=FOLDER in the environment of the workers, with an objective in the adapter",
}


@dataclass
class Found:
    """One run.

    Attributes:
        path: where it was found.
        log: None if there is none, and a dump gives none.
        dump: None if no optimizer step was recorded.
        dump_path: of the dump.
        notes: what is missing and how to get it, and what could not be read.
    """

    path: Path
    log: Run | None
    dump: Dump | None = None
    dump_path: Path | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Its name for the reader."""
        return self.log.title if self.log else str(self.path)


def find(path: Path) -> list[Found]:
    """Every run under a path.

    Raises:
        ReportError: nothing there can be read.
    """
    pasted = path == STANDARD_INPUT
    dumps = [] if pasted else _dumps(path)
    try:
        logs = _pasted() if pasted else read_logs(path)
        found = [Found(path if pasted or len(logs) == 1 else Path(log.path), log) for log in logs]
    except ReportError as refusal:
        if pasted:
            raise
        found = [Found(path, None) if dumps else Found(path, None, _export(path, refusal), path)]
    for run in found:
        _add_dump(run, dumps if len(found) == 1 else _dumps(run.path))
    return found


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
    head = text_at(path)[:SNIFFED_CHARACTERS] if path.suffix in (".json", ".jsonl") else ""
    return any(f'"{name}"' in head for name in ("token_ids", "token_loss_mask", "input", "sha256"))


def _add_dump(run: Found, dumps: Sequence[Path]) -> None:
    """Read the recorded optimizer steps of a run; without a log they are its log."""
    for path in dumps[:1]:
        try:
            run.dump, run.dump_path = _read(path), path
        except ReportError as error:
            run.notes.append(str(error).splitlines()[0])
    if len(dumps) > 1:
        run.notes.append(f"Other dumps are not looked at: {', '.join(str(path) for path in dumps[1:])}.")
    if run.log is None and run.dump is not None:
        from rlstab.look.tokens_log import tokens_log

        run.log = tokens_log(run.dump, str(run.path))
        run.notes.append("No log was found, so the signs are read only from the recorded optimizer steps.")
    if run.dump is None and run.log is not None:
        how = RECORDS.get(run.log.writer)
        run.notes.append(
            "No optimizer step was recorded, so nothing can be said about its loss, its sampler or its tokens."
            + (f" Next time: {how}." if how else "")
        )


def nearest(folder: Path) -> tuple[list[Found], list[Path]]:
    """The newest run in a folder or its subfolders, and what else can be examined.

    Raises:
        ReportError: nothing there can be read.
    """
    there = candidates(folder)
    for index, path in enumerate(there):
        with suppress(ReportError):
            return find(path), there[:index] + there[index + 1 :]
    raise ReportError(
        "Nothing in this folder can be examined. Give a run folder, the output folder of TRL, a log of verl, a CSV of "
        "wandb, or a dump; examples/dump-smollm2 is one."
    )


def candidates(folder: Path) -> list[Path]:
    """What can be examined in a folder or its subfolders, the newest first."""
    there = [folder] if _holds(folder) else []
    if not there:
        inner = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        deeper = [below for entry in inner if is_dir(entry) for below in entry.iterdir() if is_dir(below)]
        above = [entry for entry in inner if _holds(entry)]
        there = above + [entry for entry in deeper if _holds(entry) and entry.parent not in above]
    return sorted(there, key=lambda entry: -entry.stat().st_mtime)


def _holds(path: Path) -> bool:
    """Whether a path looks like a run; lines of JSON may be anything, so a folder is not taken for its files."""
    if not is_dir(path):
        return path.suffix.lower() in LOGS and path.is_file()
    names = (METRICS, f"{DUMP}/step-*", "step-*.json")
    logs = (files for writer, files in log_files(path).items() if writer != "verl")
    return any(any(path.glob(name)) for name in names) or any(logs)
