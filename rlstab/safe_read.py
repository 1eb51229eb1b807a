"""Safe reading of foreign files: what is read, what is refused, and which numbers are kept.

A reader that opens files here never waits (only regular files are opened), never fills the memory (files above
:data:`MOST_BYTES` are refused), and never recurses too deeply (JSON above :data:`MOST_DEPTH` levels is refused). Sums
and squares of the numbers cannot overflow.
"""

import codecs
import errno
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from rlstab.errors import reason

#: Bytes of the largest file that is read; as Python objects it takes many times as much.
MOST_BYTES = 2**31
#: Levels of nesting in the deepest JSON that is read. No log or export comes close, and code may recurse into it.
MOST_DEPTH = 100
#: Larger numbers count as infinite: no trainer computes with them, and their squares would overflow.
MOST_NUMBER = 1e100
#: Gaps of a log that are listed one by one.
_GAPS = 10
#: Bytes that are read of a file of unknown size, such as those in ``/proc``.
_UNSIZED = 2**24


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading, in binary.

    Raises:
        OSError: it does not exist; is a folder, a pipe, a socket or a device, which might never end; or is larger than
            :data:`MOST_BYTES`. Its ``strerror`` says which.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116  # checked first, since opening may act on a device
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        file = open(path, "rb", opener=_without_waiting)  # Path.open takes no opener
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name has a null character", str(path)) from error
    if os.fstat(file.fileno()).st_size > MOST_BYTES:
        file.close()
        raise OSError(errno.EFBIG, f"larger than {MOST_BYTES:,} bytes", str(path))
    return file


def _without_waiting(path: str, flags: int) -> int:
    # a pipe may have replaced the file in the meantime; reads of a regular file never block
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a regular file; see :func:`open_file`."""
    with open_file(path) as file:
        return file.read(os.fstat(file.fileno()).st_size or _UNSIZED) or b""


def read_text(path: str | Path) -> str:
    """The text of a regular file in UTF-8; see :func:`open_file`. Raises UnicodeDecodeError if it is not UTF-8."""
    return read_bytes(path).decode("utf-8-sig")


def text_of(content: bytes) -> str:
    """The text of a file that may be damaged, in UTF-8, or in UTF-16 if a byte order mark says so."""
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if utf16 else "utf-8-sig", errors="replace")


def parse_json(text: str | bytes, constant: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text.

    Args:
        text: a JSON text, or the bytes of one.
        constant: what ``NaN``, ``Infinity`` and ``-Infinity`` become; None is the float.

    Raises:
        ValueError: it is not JSON, is nested deeper than :data:`MOST_DEPTH` levels, or has an integer of thousands of
            digits.
    """
    from pydantic_core import from_json  # not with `import rlstab`

    try:
        data = from_json(text if constant is None else b"")  # several times as fast as json
    except ValueError:
        # json has the last word: it reads lone surrogates, other encodings, and bytes that are not UTF-8
        text = text_of(text) if isinstance(text, bytes) else text
        try:
            data = json.loads(text, parse_constant=constant)
        except RecursionError:
            raise ValueError(f"nested deeper than {MOST_DEPTH} levels") from None
    opening = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, opening)) > MOST_DEPTH and _is_deep(data):  # type: ignore[arg-type]  # of the same kind
        raise ValueError(f"nested deeper than {MOST_DEPTH} levels")
    return data


def _is_deep(data: Any) -> bool:
    level = [data]
    for _ in range(MOST_DEPTH):
        holders = (value for value in level if isinstance(value, dict | list))
        level = [item for value in holders for item in (value.values() if isinstance(value, dict) else value)]
    return bool(level)


def read_mapping(path: Path, parse: Callable[[str], Any] = parse_json) -> tuple[dict[str, Any] | None, str]:
    """The mapping in a file of JSON, or of another format with its parser; or None with the reason."""
    try:
        data = plain(parse(read_text(path)))
    except FileNotFoundError:
        return None, f"{path.name} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{path.name} cannot be read: {reason(error)}"
    return (data, "") if isinstance(data, dict) else (None, f"{path.name} is not a mapping")


def read_object(line: str | bytes) -> dict[str, Any]:
    """The object in a line of JSON; empty if the line is damaged."""
    try:
        data = parse_json(line)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if it cannot be read."""
    try:
        return read_object(read_bytes(path))
    except OSError:
        return {}


def as_float(value: Any) -> float | None:
    """A number, possibly NaN or Inf; beyond :data:`MOST_NUMBER` it is infinite. None if the value is not a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if abs(value) > MOST_NUMBER:
        return math.inf if value > 0 else -math.inf
    return float(value)


def as_number(value: Any) -> float | None:
    """As :func:`as_float`, also of a number as text: ``"0.5"``, ``"NaN"``, ``"-Infinity"``."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return as_float(value)


def as_step(value: Any) -> int | None:
    """A whole number, also as a float or as text: 61, 61.0, ``"61"``; None if it is not one."""
    number = as_number(value)
    return int(number) if number is not None and number.is_integer() else None


def gaps(steps: Iterable[int], interval: int | None = None) -> str:
    """The steps that are missing in a log, in short: ``5-7, 12``; empty if none are.

    Args:
        steps: the numbers of the steps that its lines are about.
        interval: between two lines; None takes the usual one, without which no step is missing.
    """
    neighbours = list(pairwise(sorted(set(steps))))
    if interval is None:
        between = Counter(after - before for before, after in neighbours)
        interval, count = between.most_common(1)[0] if between else (1, 0)
        if count < len(neighbours) / 2:
            return ""
    missing = [(before + interval, after - interval) for before, after in neighbours if after - before >= 2 * interval]
    ranges = [str(first) if first == last else f"{first}-{last}" for first, last in missing[:_GAPS]]
    return ", ".join([*ranges, *["..."][: len(missing) - len(ranges)]])


def plain(data: Any) -> Any:
    """The data in a form that JSON can hold: lone surrogates in texts become marks, and NaN and Inf become None.

    Args:
        data: mappings, lists, tuples and scalars, without circles.
    """
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if data is None or isinstance(data, int):
        return data
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if isinstance(data, Mapping):
        return {readable(str(key)): plain(value) for key, value in data.items()}
    return readable(str(data))


def readable(text: str) -> str:
    """A text with a mark in place of each lone surrogate, which no file can hold."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")
