"""``bench.json``: where a run belongs and how it ended, or what a bench is; replaced atomically."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstab.files import replace_file
from rlstab.safe_read import read_json

FILE = "bench.json"

#: Lines of an error that are kept.
LINES = 12

#: Bytes at the end of a log, or of metrics, that are read.
TAIL = 200_000


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a folder; empty if none can be read."""
    return read_json(folder / FILE)


def write_record(folder: Path, values: Mapping[str, Any]) -> None:
    """Replace the record, so that a kill leaves the old one or the new one."""
    replace_file(folder / FILE, json.dumps(values, indent=1) + "\n")


def record_failure(folder: Path, log: Path, ending: str) -> None:
    """Record that a run ended without recording it itself, with the last lines of a log."""
    update_record(folder, status="failed", error=end_of(log, ending), seconds=None, cpu_seconds=None)


def tail(path: Path) -> bytes:
    """The last bytes of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return file.read()
    except OSError:
        return b""


def end_of(log: Path, ending: str) -> str:
    """The last lines of a log, and how the process that wrote it ended."""
    return last_lines(f"{tail(log).decode('utf-8', errors='replace').rstrip()}\n{ending}")


def last_lines(text: str) -> str:
    """The end of a text, which states an error."""
    return "\n".join(text.strip().splitlines()[-LINES:])


def update_record(folder: Path, **values: Any) -> None:
    """Change a part of the record."""
    write_record(folder, {**read_record(folder), **values})
