"""``bench.json``: where a run belongs and how it ended, or what a bench is; replaced at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstab.files import replace_file

FILE = "bench.json"


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a folder; empty where there is none that can be read."""
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_record(folder: Path, values: Mapping[str, Any]) -> None:
    """Replace the record, so that a kill leaves the old one or the new one."""
    replace_file(folder / FILE, json.dumps(values, indent=1) + "\n")


def update_record(folder: Path, **values: Any) -> None:
    """Change a part of the record."""
    write_record(folder, {**read_record(folder), **values})
