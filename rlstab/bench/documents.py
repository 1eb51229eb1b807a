"""Documents made of parts, each value with its file and line, and the objectives that a stack makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Literal

from rlstab.config.document import Document, Keys
from rlstab.core.method_settings import check_choices


def part(document: Document, path: Keys) -> Document:
    """The value at a position as a separate document."""
    data, depth = reduce(getitem, path, document.data), len(path)
    marks = {key[depth:]: mark for key, mark in document.marks.items() if key[:depth] == path}
    return Document(data, document.name, marks)


def joined(parts: Sequence[Document]) -> Document:
    """A list of the parts; a part that is a list contributes its items."""
    items: list[Document] = []
    for document in parts:
        is_list = isinstance(document.data, list | tuple)
        items += [part(document, (index,)) for index in range(len(document.data))] if is_list else [document]
    marks = {(index, *path): mark for index, item in enumerate(items) for path, mark in item.marks.items()}
    return Document([item.data for item in items], "", marks)


def ablations(
    document: Document, base: Document | None, mode: Literal["leave_one_out", "add_one_in", "both"]
) -> dict[str, Document]:
    """Objectives by name: ``base``, ``all``, ``base-plus-s2t``, ``all-minus-s2t``, ...

    The base's objective is a part of all of them; without one there is no ``base``, and ``base-plus-s2t`` is only s2t.
    Equal objectives appear once, under the name that is first above: for a stack of two, ``all`` without one
    equals the base with the other.

    Args:
        document: a bench file; its ``stack`` is a list of methods.
        base: the objective of the base run, or None.
        mode: ``add_one_in`` makes ``base-plus-*``, ``leave_one_out`` makes ``all-minus-*``, always with ``base`` and
            ``all``.

    Raises:
        ConfigError: two items have the same name.
    """
    check_choices(ablations, mode=mode)
    items: dict[str, Document] = {}
    for index, item in enumerate(document.data["stack"]):
        # mistakes in the item are found when it is loaded
        name = str(item.get("preset", item.get("name")) if isinstance(item, Mapping) else item)
        path = "stack", index
        if name in items:
            raise document.error(path, f"two methods of the stack are called '{name}'. Remove one of them.")
        items[name] = part(document, path)
    all_names = frozenset(items)
    chosen = {"base": frozenset[str](), "all": all_names}
    if mode in ("add_one_in", "both"):
        chosen |= {f"base-plus-{name}": frozenset({name}) for name in items}
    if mode in ("leave_one_out", "both"):
        chosen |= {f"all-minus-{name}": all_names - {name} for name in items}
    objectives: dict[str, Document] = {}
    made_sets: set[frozenset[str]] = set() if base else {frozenset()}
    for label, names in chosen.items():
        if names not in made_sets:
            made_sets.add(names)
            parts = [base] if base else []
            objectives[label] = joined([*parts, *(item for name, item in items.items() if name in names)])
    return objectives
