"""Files that a report writes, which never replace other files."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rlstab.errors import ReportError
from rlstab.files import is_foreign


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
