"""The values that a setting may take, stated once in its annotation and checked whenever a method is made."""

import dataclasses
import inspect
import math
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from rlstab.errors import MethodError, OutOfRange, UnknownName, did_you_mean


class Spelled:
    """A dataclass that authors of methods make by hand: a misspelt argument is refused with the nearest one.

    Raises:
        UnknownName: no field has such a name.
    """

    def __new__(cls, *values: object, **named: object) -> Self:
        names = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]  # each is one
        name_of = getattr(cls, "name", None)
        owner, kind = (cls.__name__, "field") if name_of is None else (f"'{name_of}'", "setting")
        for name in sorted(named.keys() - names):
            raise UnknownName(
                f"{owner} has no {kind} '{name}'. {did_you_mean(name, names) if names else 'It has none.'}"
            )
        return super().__new__(cls)


@dataclass(frozen=True)
class Range(Spelled):
    """Bounds of a number: ``Annotated[float, Range(gt=0, le=1)]``."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def __contains__(self, value: float) -> bool:
        bounds = (self.gt, operator.gt), (self.ge, operator.ge), (self.lt, operator.lt), (self.le, operator.le)
        within_bounds = all(bound is None or holds(value, bound) for bound, holds in bounds)
        return within_bounds and -math.inf < value < math.inf

    def __str__(self) -> str:
        low = "(-inf" if self.gt is self.ge is None else f"({self.gt}" if self.gt is not None else f"[{self.ge}"
        high = "inf)" if self.lt is self.le is None else f"{self.lt})" if self.lt is not None else f"{self.le}]"
        return f"{low}, {high}"


@dataclass(frozen=True)
class Setting:
    """One field of a method, read from its annotation.

    Attributes:
        kinds: types that a value may have; ``int`` passes for ``float``, ``bool`` never for a number.
        choices: the only allowed values, or empty.
        range: bounds of a number, or None.
        optional: None is allowed.
        default: ``dataclasses.MISSING`` where the user has to choose.
        hint: the annotation itself.
    """

    name: str
    kinds: tuple[type, ...]
    choices: tuple[Any, ...]
    range: Range | None
    optional: bool
    default: Any
    hint: Any

    def accepts(self, value: object) -> bool:
        """Whether the value has an allowed type and lies in the range."""
        if value is None:
            return self.optional
        if self.choices:
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        if isinstance(value, bool) and bool not in self.kinds:
            return False
        if isinstance(value, int) and float in self.kinds and abs(value) <= sys.float_info.max:
            value = float(value)
        if not isinstance(value, self.kinds):
            return False
        return self.range is None or not isinstance(value, int | float) or value in self.range

    def __str__(self) -> str:
        if self.choices:
            allowed = " | ".join(map(repr, self.choices))
        else:
            allowed = " | ".join(kind.__name__ for kind in self.kinds) + (f" in {self.range}" if self.range else "")
        return allowed + (" or None" if self.optional else "")


#: Types of a setting that YAML and a repr can hold.
_KINDS = (bool, int, float, str)


@cache
def settings_of(cls: type) -> tuple[Setting, ...]:
    """The settings of a dataclass, in the order in which they are declared.

    Raises:
        MethodError: a field has a type that YAML cannot hold.
    """
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise MethodError(
            f"{cls.__qualname__}: an annotation cannot be read: {error}. Define it at the top of the module."
        ) from error
    return tuple(_setting(cls, field.name, hints[field.name], field.default) for field in dataclasses.fields(cls))


def _setting(cls: type, name: str, hint: Any, default: Any) -> Setting:
    full, bounds = hint, None
    if get_origin(hint) is typing.Annotated:
        hint, *extras = get_args(hint)
        bounds = next((extra for extra in extras if isinstance(extra, Range)), None)
    kinds: list[type] = []
    choices: list[Any] = []
    members = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for kind in members:
        if get_origin(kind) is Literal:
            choices += get_args(kind)
        elif kind in _KINDS:
            kinds.append(kind)
        elif kind is not type(None):
            raise MethodError(
                f"{cls.__qualname__}: the setting '{name}' has the type {inspect.formatannotation(full)}, which YAML "
                f"cannot hold. Use bool, int, float, str or Literal, each perhaps with | None."
            )
    return Setting(name, tuple(kinds), tuple(choices), bounds, type(None) in members, default, full)


def check_settings(owner: object, name: str, ascending: Iterable[Sequence[str]]) -> None:
    """Check every field of the dataclass instance ``owner``, and the order of some of them.

    Args:
        owner: a method.
        name: its name.
        ascending: names of settings of which none is less than the one before; None is skipped.

    Raises:
        OutOfRange: names the settings, the values and what is allowed.
    """
    cls: type = type(owner)
    for setting in settings_of(cls):
        value = getattr(owner, setting.name)
        if not setting.accepts(value):
            default = "" if setting.default is dataclasses.MISSING else f" The default is {setting.default!r}."
            raise OutOfRange(f"'{name}': {setting.name} = {value!r}, expected {setting}.{default}")
    for settings in ascending:
        values = [getattr(owner, setting) for setting in settings]
        bounds = [value for value in values if value is not None]
        if any(low > high for low, high in pairwise(bounds)):
            assignments = ", ".join(f"{setting} = {value}" for setting, value in zip(settings, values, strict=True))
            raise OutOfRange(f"'{name}': {assignments}, expected {' <= '.join(settings)}.")


def check_choices(function: Callable[..., Any], **given: object) -> None:
    """Refuse arguments that their annotations do not allow: each is a Literal, perhaps with ``| None``.

    Raises:
        OutOfRange: names the argument, the value and the nearest allowed one.
    """
    for name, value in given.items():
        choices = _choices(function, name)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            owner = function.__qualname__.removesuffix(".__init__")
            raise OutOfRange(f"{owner}: {name} = {value!r}. {did_you_mean(str(value), map(str, choices))}")


@cache
def _choices(function: Callable[..., Any], name: str) -> tuple[Any, ...]:
    hint = get_type_hints(function)[name]
    members = (hint,) if get_origin(hint) is Literal else get_args(hint)
    return tuple(choice for member in members for choice in get_args(member) or (None,))
