"""A pydantic model for each method or stage, made from the dataclass: the settings are declared once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import MISSING
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from rlstab.config.document import Document, Place
from rlstab.core.metadata import docstring
from rlstab.core.method import Method
from rlstab.core.settings import Setting, settings_of
from rlstab.errors import RlstabError

Kind = TypeVar("Kind", bound=Method[Any])


@cache
def method_model(cls: type[Method[Any]]) -> type[BaseModel]:
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


def made(document: Document, cls: type[Kind], settings: Mapping[Any, Any], place: Place) -> Kind:
    """The method or stage of a class with the settings of a part of a document.

    Raises:
        ConfigError: with file and line.
    """
    checked = document.validate(method_model(cls), {"name": cls.name, **settings}, place)
    try:
        return cls(**{one.name: getattr(checked, one.name) for one in settings_of(cls)})
    except RlstabError as error:
        raise document.error(place, str(error)) from error


def settings_as_yaml(method: Method[Any]) -> dict[str, Any]:
    """Settings by name, as YAML has them."""
    return {one.name: _plain(one, getattr(method, one.name)) for one in settings_of(type(method))}


def _plain(setting: Setting, value: Any) -> Any:
    """A tuple as a list. Numbers that are equal look equal: 1 is 1.0 and -0.0 is 0.0 where a float is wanted."""
    if setting.items is not None and isinstance(value, tuple):
        return [_plain(setting.items, one) for one in value]
    if float in setting.kinds and int not in setting.kinds and isinstance(value, int | float):
        return float(value) + 0.0
    return value
