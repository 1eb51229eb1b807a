"""A pydantic model for each method, made from the dataclass: the settings are declared once."""

from __future__ import annotations

import functools
import operator
from dataclasses import MISSING
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from rlstab.core.docstring import docstring
from rlstab.core.objective import TokenObjective
from rlstab.core.settings import Setting, settings_of


@cache
def method_model(cls: type[TokenObjective]) -> type[BaseModel]:
    """The pydantic model of a method: its ``name``, then its settings with their ranges and defaults."""
    fields: dict[str, Any] = {"name": (Literal[cls.name], cls.name)}
    for one in settings_of(cls):
        fields[one.name] = (_annotation(one), _field(one))
    return create_model(
        cls.__name__,
        __config__=ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False),
        __doc__=docstring(cls).partition("\n")[0],
        **fields,
    )


def _annotation(one: Setting) -> Any:
    allowed: list[Any] = [*one.kinds, *([Literal[one.choices]] if one.choices else [])]
    if one.items is not None:
        items: Any = _limited(one.items)
        allowed.append(Annotated[tuple[items, ...], Field(strict=False)])  # YAML has lists
    return functools.reduce(operator.or_, [*allowed, *([None] if one.optional else [])])


def _limited(one: Setting) -> Any:
    return Annotated[_annotation(one), _field(one)]


def _field(one: Setting) -> Any:
    limits: dict[str, Any] = {}
    if one.range is not None:
        bounds = {"gt": one.range.gt, "ge": one.range.ge, "lt": one.range.lt, "le": one.range.le}
        limits = {key: value for key, value in bounds.items() if value is not None}
    return Field(**limits) if one.default is MISSING else Field(default=one.default, **limits)
