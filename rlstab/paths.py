"""Whether something is at a path, for paths that a user typed.

Those of :class:`pathlib.Path` raise where a name is too long or a folder may not be searched, up to Python 3.13.
"""

from __future__ import annotations

import os
from pathlib import Path


def exists(path: str | Path) -> bool:
    """Whether something is there that can be reached."""
    return os.path.exists(path)  # noqa: PTH110  # see above


def is_file(path: str | Path) -> bool:
    """Whether an ordinary file is there that can be reached."""
    return os.path.isfile(path)  # noqa: PTH113


def is_dir(path: str | Path) -> bool:
    """Whether a folder is there that can be reached."""
    return os.path.isdir(path)  # noqa: PTH112


def is_strange(path: str | Path, *marks: bytes) -> bool:
    """Whether an ordinary file is there that has something in it and none of the marks: not one of ours to replace.

    Args:
        path: to which something is about to be written.
        marks: of what the same command writes; one of them is in its first 4096 bytes.
    """
    if not is_file(path):
        return False
    with Path(path).open("rb") as file:
        head = file.read(4096)
    return bool(head) and not any(one in head for one in marks)
