"""Files that a report writes, which never replace other files, and data in a page, which stays data."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rlstab.errors import ReportError
from rlstab.files import is_foreign

#: Characters that could end a script element, open a comment in it, or end a line in older scripts.
_UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def resource(name: str) -> str:
    """The text of a file in this folder."""
    return (resources.files("rlstab.report") / name).read_text(encoding="utf-8")


def write_text(path: Path, content: str | bytes, option: str) -> Path:
    """Write a file, make its folder, and return its path; an error names the option for another path.

    Raises:
        ReportError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise ReportError(f"{path}: cannot be written: {error.strerror}. Give another path by {option}.") from error
    return path


def refuse_foreign(path: Path, marks: Sequence[bytes], what: str, option: str) -> None:
    """Refuse to overwrite a file of another kind.

    Args:
        path: of the file to be written.
        marks: each file of the kind has one of them in its first 4096 bytes.
        what: the kind, such as ``a report``.
        option: the option for another path.

    Raises:
        ReportError: another file is there, or it cannot be read.
    """
    try:
        foreign = is_foreign(path, *marks)
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}. Give another path by {option}.") from error
    if foreign:
        raise ReportError(f"{path} exists, is not {what}, and stays as it is. Give another path by {option}.")


def digest(text: str) -> str:
    """What a content policy calls a script or a style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def packed(text: str) -> str:
    """A text for a page that unpacks it: gzip in base64, a third as long and the same at each call."""
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()


def safe_json(data: Any) -> str:
    """JSON for a ``<script>`` element, which nothing in it can end."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.translate(_UNSAFE)
