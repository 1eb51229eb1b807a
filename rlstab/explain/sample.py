"""A method or a stage of a class, to ask what does not depend on its settings."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from rlstab.core.method import Method
from rlstab.core.settings import settings_of
from rlstab.errors import RlstabError

Kind = TypeVar("Kind", bound=Method[Any])

#: Tried in turn for a setting without a default.
_VALUES = (0.5, 2, 2.0, "", True)


def sample(cls: type[Kind]) -> Kind | None:
    """With its defaults, and with some value that fits where there is none; None where none of ours fits."""
    required = [one for one in settings_of(cls) if one.default is dataclasses.MISSING]
    try:
        chosen = {one.name: next(value for value in (*one.choices, *_VALUES) if one.accepts(value)) for one in required}
        return cls(**chosen)
    except (StopIteration, RlstabError):
        return None
