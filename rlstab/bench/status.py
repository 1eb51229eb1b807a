"""``bench.json`` of a run: where it belongs and how it ended, written beside and renamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "bench.json"


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder; None where there is none that can be read."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_record(folder: Path, values: Mapping[str, Any]) -> None:
    """Replace the record at once, so that a kill leaves the old one or the new one."""
    writing = folder / f".{FILE}.writing"
    writing.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    writing.replace(folder / FILE)


def update_record(folder: Path, **values: Any) -> None:
    """Change a part of the record."""
    write_record(folder, {**(read_record(folder) or {}), **values})
