"""``bench.json``: where a run belongs and how it ended, or what a bench is; replaced at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstab.files import replace_file
from rlstab.safe_read import read_bytes, read_object

FILE = "bench.json"


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a folder; empty where there is none that can be read."""
    try:
        return read_object(read_bytes(folder / FILE))
    except OSError:
        return {}


def write_record(folder: Path, values: Mapping[str, Any]) -> None:
    """Replace the record, so that a kill leaves the old one or the new one."""
    replace_file(folder / FILE, json.dumps(values, indent=1) + "\n")


def update_record(folder: Path, **values: Any) -> None:
    """Change a part of the record."""
    write_record(folder, {**read_record(folder), **values})
