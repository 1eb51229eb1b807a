"""Parts of documents put together, each value with the file and line from which it came."""

from __future__ import annotations

from collections.abc import Sequence

from rlstab.config.document import Document, Place
from rlstab.errors import ConfigError


def part(document: Document, place: Place) -> Document:
    """The value at a place as a document of its own."""
    data = document.data
    for step in place:
        data = data[step]
    depth = len(place)
    marks = {one[depth:]: mark for one, mark in document.marks.items() if one[:depth] == place}
    return Document(data, document.name, marks)


def placed(document: Document, path: str, value: Document) -> Document:
    """The document with another value at a dotted path.

    Raises:
        ConfigError: there is no mapping to set it in.
    """
    place = tuple(path.split("."))
    try:
        found = document.replaced(path, value.data)
    except ConfigError as error:
        reason = str(error).removeprefix(f"--set {path}: ")
        raise ConfigError(value.text((), f"{path}: {reason}")) from None
    marks = {one: mark for one, mark in found.marks.items() if one[: len(place)] != place}
    moved = {(*place, *one): mark for one, mark in value.marks.items()}
    return Document(found.data, found.name, {**marks, **moved})


def joined(parts: Sequence[Document]) -> Document:
    """A list of the parts; a part that is a list gives its items."""
    items: list[Document] = []
    for one in parts:
        several = isinstance(one.data, list | tuple)
        items += [part(one, (index,)) for index in range(len(one.data))] if several else [one]
    marks = {(index, *place): mark for index, one in enumerate(items) for place, mark in one.marks.items()}
    return Document([one.data for one in items], "", marks)
