"""Files of one JSON object per line: ``metrics.jsonl``, ``samples.jsonl``, ``tokens.jsonl``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlstab.train import durable

#: Integers from here on are nothing that a run counted.
LARGEST = 2**63


class Journal:
    """A file that lines are appended to, each by one call to the system, so that a reader sees whole lines.

    Args:
        path: of the file, which is made with its first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def append(self, lines: str) -> None:
        """Append whole lines.

        Raises:
            ConfigError: the file cannot be written.
        """
        with durable.saying(self.path):
            if self._handle is None:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            durable.write_all(self._handle, lines.encode("utf-8"))

    def flush(self) -> None:
        """Have every line on the disk."""
        if self._handle is not None:
            with durable.saying(self.path):
                os.fsync(self._handle)

    def close(self) -> None:
        """Let go of the file."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def line(record: Mapping[str, Any]) -> str:
    """A record as a line of JSON, which has no NaN and no Inf: such a number is null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()
    }
    return json.dumps(plain, allow_nan=False) + "\n"


def read(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The records of a file of numbers, without what is none, and the numbers of the lines that are no record.

    A last line without its end was cut off by a kill and is neither.
    """
    records, damaged = [], []
    for number, text in enumerate(_lines(path), 1):
        record = _record(text)
        if record is None:
            damaged.append(number)
        else:
            records.append({key: value for key, value in record.items() if _is_number(value)})
    return records, damaged


def cut_after(path: Path, last: int) -> None:
    """Remove the records after a rollout, and what a kill left of a line, by writing the file anew.

    Lines that cannot be read stay where a record follows that stays.
    """
    if not path.exists():
        return
    beside = durable.beside(path)
    durable.remove(beside)
    pending, size = b"", 0
    with beside.open("xb") as file:
        for text in _lines(path):
            pending += text
            record = _record(text)
            if record is not None:
                if record["rollout"] <= last:
                    size += file.write(pending)
                pending = b""
        file.flush()
        os.fsync(file.fileno())
    if size == path.stat().st_size:
        durable.remove(beside)
    else:
        durable.move(beside, path)


def _lines(path: Path) -> Iterable[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from (text for text in file if text.endswith(b"\n"))


def _record(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        found = found if isinstance(found, dict) else {}
    except (ValueError, RecursionError):  # also an integer of thousands of digits
        return None
    rollout = found.get("rollout")
    return found if type(rollout) is int and 0 <= rollout < LARGEST else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < LARGEST)
