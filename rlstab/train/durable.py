"""Files that a kill or a power cut leaves whole: written beside, flushed to the disk, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rlstab.errors import CheckpointError, ConfigError


def write(path: Path, text: str) -> None:
    """Make ``path`` hold ``text``: at any moment all of the old or all of the new. Equal text is not written."""
    data = text.encode("utf-8")
    if path.is_file() and path.read_bytes() == data:
        return
    place = beside(path)
    remove(place)
    handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        write_all(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)
    place.replace(path)
    flush(path.parent)


def beside(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f".{path.name}.writing")


def write_all(handle: int, data: bytes) -> None:
    """Write all of ``data``, which one call to the system need not do."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def flush(path: Path) -> None:
    """Have what was written to a file, or renamed in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move(path: Path, to: Path) -> None:
    """Rename, on the disk when it returns."""
    path.replace(to)
    for folder in {path.parent, to.parent}:
        flush(folder)


def there(path: Path) -> bool:
    """Whether something has this name, a link to nothing included."""
    return path.exists() or path.is_symlink()


def remove(path: Path) -> None:
    """Remove a file, a link (not what it points at) or a folder with all in it; what is not there is removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_empty(folder: Path) -> bool:
    """Remove a folder that holds nothing; whether it is gone."""
    try:
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def reason(error: Exception) -> str:
    """Why the system refused, in a few words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@contextmanager
def saying(path: Path, kind: type[ConfigError | CheckpointError] = ConfigError) -> Iterator[None]:
    """An error of the file system becomes one of rlstab that names the file and the reason."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        where = getattr(error, "filename", None) or path
        raise kind(
            f"{where} cannot be written: {reason(error)}. Mend that and continue with --resume, or set another "
            f"tracking.out."
        ) from error
