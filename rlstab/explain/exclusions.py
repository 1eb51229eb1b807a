"""Which methods cannot be composed, as their classes declare it: for the card of each, and in one list."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence

from rlstab.core.objective import TokenObjective
from rlstab.core.settings import settings_of
from rlstab.core.terms import SLOTS, WRITABLE
from rlstab.explain.card_sections import card
from rlstab.zoo import METHODS

#: Two fields of Terms that no composition has both: each is a surrogate.
RIVALS = ("surrogate", "bounds")


def shipped() -> list[type[TokenObjective]]:
    """The methods of rlstab itself, by name; those of other packages have pages of their own."""
    return [cls for cls in map(METHODS.get, METHODS.names()) if cls.__module__.startswith("rlstab.zoo.")]


def exclusions() -> list[tuple[str, str]]:
    """What a composition has once at most and whose that is; then which methods exclude each other, and why."""
    found = [(f"one {slot}", f"{named(writers(slot))}. A composition has at most one of these.") for slot in SLOTS]
    found.append(
        (
            " or ".join(RIVALS),
            "a pull says with what a token pulls instead of its ratio, and bounds are a trust region of the ratio. A "
            "composition has one of these.",
        )
    )
    for cls in shipped():
        found += [(f"`{cls.name}` and {whom(key)}", why) for key, why in excludes(cls).items()]
    return found


def excludes(cls: type[TokenObjective]) -> dict[str, str]:
    """With which methods or fields a method cannot be composed, at any of its choices."""
    declared = inspect.getattr_static(cls, "excludes")
    if not isinstance(declared, property):
        return dict(declared)
    if "excludes" not in vars(cls):
        return {}
    found: dict[str, str] = {}
    choices = [[(one.name, value) for value in one.choices] for one in settings_of(cls) if one.choices]
    for chosen in itertools.product(*choices):
        found |= cls(**dict(chosen)).excludes
    return found


def whom(key: str) -> str:
    """A method, or the methods that may fill a field."""
    return f"a method with {key} ({named(writers(key))})" if key in WRITABLE else f"`{key}`"


def writers(field: str) -> list[str]:
    """The methods that may fill a field of Terms, under any of their settings."""
    return [cls.name for cls in shipped() if field in card(cls).heads("Writes")]


def named(names: Sequence[str]) -> str:
    """Names in backticks: "a, b and c"."""
    *first, last = [f"`{one}`" for one in names] or ["none that ships"]
    return f"{', '.join(first)} and {last}" if first else last
