"""Objectives in YAML: a list of methods with their settings, presets by name, `within` for the explicit exception.

::

    objective:
      - preset: dapo                     # a recipe, in place
        set: {clip_higher: {high: 0.3}}  # with other settings
        drop: [token_mean]               # or without a part of it
      - {name: s2t, max_prob: 0.01}      # and more methods
      - name: within
        outer: {name: s2t}
        inner: {name: stare}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlstab.config.document import Document, Place
from rlstab.config.methods import method_model
from rlstab.core.compose import Composition, Within, compose, within
from rlstab.core.errors import ConfigError, Conflict, RlstabError, UnknownName, did_you_mean
from rlstab.core.objective import TokenObjective
from rlstab.presets import PRESETS, Preset, preset
from rlstab.zoo import METHODS


class PresetItem(BaseModel):
    """A recipe in place."""

    model_config = ConfigDict(extra="forbid")
    preset: str
    set: dict[str, dict[str, Any]] = {}
    drop: list[str] = []


class WithinItem(BaseModel):
    """``inner`` sees only the tokens that ``outer`` keeps."""

    model_config = ConfigDict(extra="forbid")
    name: str
    outer: Any
    inner: Any


def load_objective(source: str | Path | Mapping[str, Any] | Sequence[Any]) -> Composition:
    """See :func:`rlstab.load_objective`."""
    document = Document.read(source) if isinstance(source, str | Path) else Document.of(source)
    data, place = document.data, Place()
    if isinstance(data, Mapping) and "objective" in data:
        data, place = data["objective"], ("objective",)
    return build_objective(document, data, place)


def build_objective(document: Document, data: Any, place: Place = ()) -> Composition:
    """The composition that stands at ``place`` of a document.

    Raises:
        ConfigError: with file and line.
        Conflict: the methods do not fit together.
    """
    items = data if isinstance(data, list | tuple) else [data]
    if data is None or not items:
        raise document.error(
            place, "the objective is empty. List at least one method, for example: - name: clip_higher"
        )
    methods = [
        method
        for index, item in enumerate(items)
        for method in _item(document, item, (*place, index) if isinstance(data, list | tuple) else place)
    ]
    try:
        return compose(*methods)
    except Conflict as error:
        raise Conflict(f"{document.where(place)}: {error}") from None


def presets_of(data: Any) -> list[Preset]:
    """The presets that an objective names, in the order in which they stand."""
    items = data if isinstance(data, list | tuple) else [data]
    named = [item.get("preset") for item in items if isinstance(item, Mapping)]
    return [PRESETS[name] for name in named if isinstance(name, str) and name in PRESETS]


def _item(document: Document, item: Any, place: Place) -> list[TokenObjective]:
    if isinstance(item, str):
        item = {"name": item}
    if not isinstance(item, Mapping):
        raise document.error(place, f"expected a method, for example {{name: s2t}}, not {item!r}.")
    if "preset" in item:
        return _preset(document, item, place)
    if "name" not in item:
        raise document.error(place, "a method needs its `name`, or `preset` for a recipe.")
    name = item["name"]
    if name == "within":
        parts = document.validate(WithinItem, dict(item), place)
        assert isinstance(parts, WithinItem)
        outer, inner = (
            compose(*_item(document, part, (*place, key)))
            for key, part in (("outer", parts.outer), ("inner", parts.inner))
        )
        try:
            return [within(_single(outer), _single(inner))]
        except Conflict as error:
            raise Conflict(f"{document.where(place)}: {error}") from None
    return [_method(document, name, {key: value for key, value in item.items() if key != "name"}, place)]


def _single(composition: Composition) -> TokenObjective:
    return composition.members[0] if len(composition.members) == 1 else composition


def _method(document: Document, name: Any, settings: Mapping[str, Any], place: Place) -> TokenObjective:
    try:
        cls = METHODS.get(str(name))
    except UnknownName as error:
        raise document.error((*place, "name"), str(error)) from error
    checked = document.validate(method_model(cls), {"name": name, **settings}, place)
    values = {one.name: getattr(checked, one.name) for one in dataclasses.fields(cls)}  # type: ignore[arg-type]
    try:
        return cls(**values)
    except RlstabError as error:
        raise document.error(place, str(error)) from error


def _preset(document: Document, item: Mapping[str, Any], place: Place) -> list[TokenObjective]:
    checked = document.validate(PresetItem, dict(item), place)
    assert isinstance(checked, PresetItem)
    try:
        recipe = preset(checked.preset)
    except UnknownName as error:
        raise document.error((*place, "preset"), str(error)) from error
    entries = dump_objective(recipe.objective)
    names = [str(entry["name"]) for entry in entries]
    for key, wanted in (("set", checked.set), ("drop", checked.drop)):
        for name in wanted:
            if name not in names:
                text = f"preset '{checked.preset}' has no method '{name}'. {did_you_mean(name, names)}"
                raise document.error((*place, key, name), text)
    methods = []
    for entry in entries:
        if entry["name"] in checked.drop:
            continue
        changed = checked.set.get(str(entry["name"]), {})
        where = (*place, "set", str(entry["name"])) if changed else place
        methods += _item(document, {**entry, **changed}, where)
    return methods


def dump_objective(objective: TokenObjective) -> list[dict[str, Any]]:
    """The canonical form: every setting of every method, in the order of the composition."""
    members = objective.members if isinstance(objective, Composition) else (objective,)
    return [_dump(one) for one in members]


def _dump(method: TokenObjective) -> dict[str, Any]:
    if isinstance(method, Within):
        return {"name": method.name, "outer": _part(method.outer), "inner": _part(method.inner)}
    values = {one.name: getattr(method, one.name) for one in dataclasses.fields(method)}  # type: ignore[arg-type]
    return {"name": method.name, **values}


def _part(method: TokenObjective) -> dict[str, Any]:
    if isinstance(method, Composition):
        raise ConfigError(
            "a composition inside `within` cannot be written as YAML. Nest one method on each side, or stay in Python."
        )
    return _dump(method)


def objective_hash(objective: TokenObjective) -> str:
    """Twelve hexadecimal digits; two objectives share them exactly when methods and settings are the same."""
    return digest(dump_objective(objective))


def digest(data: Any) -> str:
    """The first twelve hexadecimal digits of the SHA-256 of the canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
