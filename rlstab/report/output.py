"""Files that a report writes, which never replace other files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlstab.errors import ReportError, reason
from rlstab.files import is_foreign


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Errors of the system about a path, as one that names the option for another.

    Raises:
        ReportError: the path cannot be read or written.
    """
    try:
        yield
    except ReportError:
        raise
    except FileExistsError as error:
        raise ReportError(
            f"{path}: cannot be written: its folder is a file or a broken link. Give another path by {option}."
        ) from error
    except (OSError, ValueError) as error:  # a name with a null character
        raise ReportError(f"{path}: cannot be written: {reason(error)}. Give another path by {option}.") from error


def write_text(path: Path, content: str | bytes, option: str) -> Path:
    """Write a file, make its folder, and return its path; see :func:`writing`."""
    with writing(path, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refuse_foreign(path: Path, marks: Sequence[bytes], what: str, option: str) -> None:
    """Refuse to overwrite a file of another kind.

    Args:
        path: the file to be written.
        marks: each file of the kind has one of them in its first 4096 bytes.
        what: the kind, such as ``a report``.
        option: the option for another path.

    Raises:
        ReportError: another file is there, or it cannot be read.
    """
    with writing(path, option):
        foreign = is_foreign(path, *marks)
    if foreign:
        raise ReportError(f"{path} exists, is not {what}, and stays as it is. Give another path by {option}.")
