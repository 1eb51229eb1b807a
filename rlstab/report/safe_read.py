"""Read files that somebody else wrote: ordinary files alone, and data without surprises for the code that reads on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def read_bytes(path: Path) -> bytes:
    """The bytes of an ordinary file.

    Raises:
        OSError: there is none; a device or a pipe might never end.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is not an ordinary file")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """The text of an ordinary file in UTF-8; see :func:`read_bytes`."""
    return read_bytes(path).decode("utf-8")


def read_mapping(path: Path, parse: Callable[[str], Any] = json.loads) -> tuple[dict[str, Any] | None, str]:
    """The mapping in a file of JSON, or of what ``parse`` reads, or None with the reason."""
    try:
        data = plain(parse(read_text(path)))
    except FileNotFoundError:
        return None, f"{path.name} is missing"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{path.name} cannot be read: {first_line(error)}"
    return (data, "") if isinstance(data, dict) else (None, f"{path.name} is not a mapping")


def read_object(line: bytes) -> dict[str, Any]:
    """The object in a line of JSON; an empty one where it is damaged."""
    try:
        data = json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):  # also an integer of thousands of digits
        return {}
    return data if isinstance(data, dict) else {}


def as_float(value: Any) -> float | None:
    """A number, NaN and Inf among them; None where it is something else, or an integer beyond all floats."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if isinstance(value, float) or abs(value) < 10**300 else None


def first_line(error: Exception) -> str:
    """The first line of an error, its class where it has no text."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def plain(data: Any) -> Any:
    """The same as JSON can hold it: text gets a mark in place of each lone surrogate, NaN and Inf are None.

    Args:
        data: mappings, lists, tuples and scalars, without circles.
    """
    if isinstance(data, Mapping):
        return {readable(str(key)): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    return data if data is None or isinstance(data, int) else readable(str(data))


def readable(text: str) -> str:
    """A text with a mark in place of each lone surrogate, which no file can hold."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")
