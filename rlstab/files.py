"""Files that a user names: whether they exist, whether they may be replaced, how to write them, and code in them.

The checks of :class:`pathlib.Path` raise if a name is too long or a folder may not be searched, up to Python 3.13.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rlstab.errors import ConfigError, RlstabError, reason
from rlstab.run_files import LOCK
from rlstab.safe_read import open_file, read_bytes

if TYPE_CHECKING:
    from filelock import AcquireReturnProxy


def from_home(path: str) -> Path:
    """A path with ``~`` and ``~user`` in full; that of an unknown user stays as it is."""
    try:
        return Path(os.path.expanduser(path))  # noqa: PTH111  # Path's raises for an unknown user
    except ValueError:  # a null character, or half of a surrogate pair
        return Path(path)


#: Whether a path exists and can be reached.
exists = os.path.exists
#: Whether a path is a regular file that can be reached.
is_file = os.path.isfile
#: Whether a path is a folder that can be reached.
is_dir = os.path.isdir


def leads_away(path: str | Path) -> bool:
    """Whether a path is a link out of its folder, so that writing to it would change a file outside."""
    path = Path(path)
    return os.path.islink(path) and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent))  # noqa: PTH114  # see above


def is_foreign(path: str | Path, *marks: bytes) -> bool:
    """Whether a path must not be replaced, because it is a link to another folder or a file without a mark.

    Args:
        path: the path that would be written.
        marks: texts that only files of the same command hold; one of them is in the first 4096 bytes.
    """
    if leads_away(path):
        return True
    if not is_file(path):
        return False
    with open_file(path) as file:
        head = file.read(4096)
    return bool(head) and not any(mark in head for mark in marks)


def write_text(path: str | Path, text: str, *marks: bytes) -> None:
    """Write a file; only an earlier file of the same command, with one of the marks in it, is replaced.

    Raises:
        ConfigError: another file is there, or the file cannot be written.
    """
    try:
        if is_foreign(path, *marks):
            raise FileExistsError
        with Path(path).open("w" if marks else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists and is not replaced. Give --out another file.") from error
    except (OSError, ValueError) as error:  # a name with a null character
        raise ConfigError(f"{path}: cannot be written: {reason(error)}. Give --out another file.") from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that at any moment, also after a kill, it has all of the old or all of the new content.

    Several processes may write one path at a time: each has a temporary file, and the last to finish counts.
    """
    writing = path.with_name(f".{path.name}.{os.getpid()}.writing")
    with writing.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    writing.replace(path)


@contextmanager
def filesystem_errors(
    path: Path, kind: type[RlstabError] = ConfigError, errors: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """Turn errors of the file system into one of rlstab with the file and the reason."""
    try:
        yield
    except errors as error:
        raise kind(
            f"{getattr(error, 'filename', None) or path} cannot be written: {reason(error)}. Fix that and continue: "
            f"`rlstab train` with --resume, `rlstab bench` with --retry."
        ) from error


def locked(folder: Path, advice: str) -> AcquireReturnProxy[Any]:
    """The context of a lock on a folder, which is made; the kernel releases it when this process ends.

    Raises:
        ConfigError: another process has it; ends with the advice.
    """
    from filelock import FileLock, Timeout  # not in every installation

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK
    try:
        lock = FileLock(file).acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"{folder} is being written by another process ({file.read_text()}). {advice}") from None
    file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    return lock


def checksum(content: bytes) -> str:
    """Twelve hexadecimal digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]


def checksum_of_file(path: Path) -> str:
    """Hexadecimal digits of the SHA-256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_modules: dict[tuple[Path, str], ModuleType] = {}


def load_module(path: Path) -> ModuleType:
    """The module of a .py file, loaded again only if the file changes. Raises whatever the file raises."""
    content = read_bytes(path)
    key = path, checksum(content)
    if key not in _modules:
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # it may import its neighbours; last, so that it hides no other module
        spec = importlib.util.spec_from_file_location(f"user_{path.stem}_{checksum(str(path).encode())}", path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up there
        try:
            # not by its loader, whose bytecode is that of a file of the same size and second
            exec(compile(content, str(path), "exec", dont_inherit=True), vars(module))
        except BaseException:
            del sys.modules[spec.name]
            raise
        _modules[key] = module
    return _modules[key]


def in_one_line(error: BaseException, path: Path | None = None) -> str:
    """An error of user code in one line, with the last line number in the user's file."""
    if isinstance(error, RlstabError):
        return str(error).rstrip(".")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines = [error.lineno]
    where = f" ({path.name}, line {lines[-1]})" if path is not None and lines else ""
    try:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
    except (Exception, SystemExit):  # its text is user code too
        text = "without a text"
    return f"{type(error).__name__}: {' '.join(text.split())}{where}"
