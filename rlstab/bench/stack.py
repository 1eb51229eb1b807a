"""Leave one out, add one in: the methods that a stack makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rlstab.bench.part import joined, part
from rlstab.config.document import Document

Ablation = Literal["leave_one_out", "add_one_in", "both"]


def ablations(document: Document, base: Document | None, how: Ablation) -> dict[str, Document]:
    """Objectives by name: ``base``, ``all``, ``base-plus-s2t``, ``all-minus-s2t``, ...

    The base's objective is a part of all of them; without one there is no ``base``, and ``base-plus-s2t`` is s2t alone.
    What would come twice comes once, under the name that stands first above: of a stack of two, ``all`` without one
    is the base with the other.

    Args:
        document: a bench file; its ``stack`` is a list of methods.
        base: the objective of the base run, or None.
        how: ``add_one_in`` makes ``base-plus-*``, ``leave_one_out`` makes ``all-minus-*``, always beside ``base`` and
            ``all``.

    Raises:
        ConfigError: two items have one name.
    """
    items: dict[str, Document] = {}
    for index, item in enumerate(document.data["stack"]):
        name, place = _label(item), ("stack", index)
        if name in items:
            raise document.error(place, f"two methods of the stack are called '{name}'. Remove one of them.")
        items[name] = part(document, place)
    every = frozenset(items)
    chosen = {"base": frozenset[str](), "all": every}
    if how in ("add_one_in", "both"):
        chosen |= {f"base-plus-{name}": frozenset({name}) for name in items}
    if how in ("leave_one_out", "both"):
        chosen |= {f"all-minus-{name}": every - {name} for name in items}
    found: dict[str, Document] = {}
    seen: set[frozenset[str]] = set() if base else {frozenset()}
    for label, names in chosen.items():
        if names not in seen:
            seen.add(names)
            parts = [base] if base else []
            found[label] = joined([*parts, *(one for name, one in items.items() if name in names)])
    return found


def _label(item: Any) -> str:
    """What the parts of a name call an item of the stack; mistakes in it are found when it is loaded."""
    if isinstance(item, Mapping):
        item = item.get("preset", item.get("name"))
    return str(item)
