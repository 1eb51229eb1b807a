"""When two runs are the same, and what a resumed run may change: by the marks on the fields of their settings."""

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlstab.config.document import flat
from rlstab.config.settings import Mark, Neutral, RunSettings
from rlstab.config.user_code import checksums, portable
from rlstab.files import checksum


def run_hash(run: RunSettings) -> str:
    """Twelve hexadecimal digits over everything that can change what a run learns beyond the rounding of float32.

    User-defined code and data files count by name and content.
    """
    settings = run.model_dump(mode="json")
    return settings_hash(settings, checksums(settings))


def settings_hash(settings: Mapping[str, Any], code: Mapping[str, str]) -> str:
    """The hash of a run from its stored settings and checksums of files; see :func:`run_hash`."""
    values = flat(portable(settings))
    counting = {path: value for path, value in values.items() if not is_neutral(path, values)}
    return digest(counting | ({"code": dict(code)} if code else {}))


def digest(data: Any) -> str:
    """The first twelve hexadecimal digits of the SHA-256 of the canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return checksum(text.encode())


def is_neutral(path: str, values: Mapping[str, Any]) -> bool:
    """Whether a setting cannot change what a run learns beyond the rounding of float32.

    Args:
        path: dotted, such as ``optimisation.micro_batch_size``; an item of a list is named by its index or its name.
        values: the settings of the run, by dotted path.
    """
    return isinstance(_mark(path), Neutral) and _may_differ(path, values)


def is_measured(path: str) -> bool:
    """Whether a setting changes only what evaluations measure."""
    mark = _mark(path)
    return isinstance(mark, Neutral) and mark.measured


def change_in_resume(before: Any, after: Any) -> tuple[str, Any, Any] | None:
    """The first setting of a run that a resume may not change and that differs: its path, and both values."""
    old_values, new_values = flat(before), flat(after)
    for path in sorted(old_values.keys() | new_values.keys()):
        if old_values.get(path) != new_values.get(path) and not _may_differ(path, old_values):
            return path, old_values.get(path), new_values.get(path)
    return None


def _may_differ(path: str, values: Mapping[str, Any]) -> bool:
    """Whether a setting has a mark, and the mark holds with the values of the run; a value that is missing fits."""
    mark = _mark(path)
    return mark is not None and (not mark.where or values.get(*mark.where) == mark.where[1])


@cache
def _mark(path: str) -> Mark | None:
    """The mark of a setting, or of its section."""
    marks = [mark for pattern, mark in _marks() if fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")]
    return marks[-1] if marks else None


@cache
def _marks() -> tuple[tuple[str, Mark], ...]:
    """Patterns of dotted paths with their marks, sections before their settings."""
    fields = settings_in(RunSettings)
    return tuple((path, mark) for path, _, field in fields for mark in field.metadata if isinstance(mark, Mark))


def settings_in(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], FieldInfo]]:
    """All settings by dotted path, with ``*`` for items of a tuple, each with the model that it is a field of."""
    for name, field in model.model_fields.items():
        yield prefix + name, model, field
        for inner_model, depth in models_in(field.annotation):
            yield from settings_in(inner_model, f"{prefix}{name}.{depth}")


def models_in(annotation: Any, depth: str = "") -> Iterator[tuple[type[BaseModel], str]]:
    """The models in an annotation, with ``*.`` for items of a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, depth
    for argument in get_args(annotation):
        yield from models_in(argument, "*." if getattr(annotation, "__origin__", None) is tuple else depth)
