"""Objectives in YAML: a list of methods with their settings, presets by name, `within` for the explicit exception.

::

    objective:
      - preset: dapo                     # a recipe, in place
        set: {clip_higher: {high: 0.3}}  # with other settings
        drop: [token_mean]               # or without a part of it
      - {name: s2t, max_prob: 0.01}      # and more methods
      - name: within
        outer: {name: s2t}
        inner: {name: stare}             # or a list of methods
      - {name: observe, method: {name: lp_reg}}  # measured and reported, without effect
      - {name: methods.py:SpareForks, share: 0.2}  # a class in a file of one's own
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlstab.config.document import MAX_DEPTH, Document, Place, shown
from rlstab.config.methods import made, settings_as_yaml
from rlstab.config.own_code import is_own, load_method, located, name_in_yaml, short
from rlstab.core.compose import Composition, Observe, Within, compose, observe, walk, within
from rlstab.core.objective import TokenObjective, check_complete
from rlstab.errors import Conflict, UnknownName, did_you_mean
from rlstab.presets import PRESETS, Preset, preset
from rlstab.stages import STAGES
from rlstab.zoo import METHODS


class PresetItem(BaseModel):
    """A recipe in place."""

    model_config = ConfigDict(extra="forbid")
    preset: str
    set: dict[str, dict[str, Any]] = {}
    drop: list[str] = []


class ObserveItem(BaseModel):
    """``method`` is measured and reported, and changes nothing."""

    model_config = ConfigDict(extra="forbid")
    name: str
    method: Any


class WithinItem(BaseModel):
    """``inner`` sees only the tokens that ``outer`` keeps."""

    model_config = ConfigDict(extra="forbid")
    name: str
    outer: Any
    inner: Any


def load_objective(source: str | Path | Mapping[str, Any] | Sequence[Any]) -> Composition:
    """See :func:`rlstab.load_objective`."""
    document = Document.read(source) if isinstance(source, str | Path) else Document.of(source)
    if not isinstance(document.data, Mapping) or document.data.keys() & {"name", "preset"}:
        document = document.under("objective")
    document = located(document)
    return build_objective(document)


def build_objective(document: Document) -> Composition:
    """The composition under the key ``objective`` of a document that is a mapping.

    Raises:
        ConfigError: with file and line.
        Conflict: the methods do not fit together.
    """
    if "objective" not in document.data:
        raise document.error((), "the key `objective` is missing. List the methods of the loss, or name a preset.")
    composition = _composed(document, document.data["objective"], ("objective",))
    try:
        check_complete(composition)
    except Conflict as error:
        raise Conflict(document.text(("objective",), str(error))) from None
    return composition


def presets_of(data: Any) -> list[Preset]:
    """The presets that an objective names, in order."""
    items = data if isinstance(data, list | tuple) else [data]
    mappings = [item for item in items if isinstance(item, Mapping)]
    named = [item["preset"] for item in mappings if "preset" in item]
    inside = [
        found for item in mappings for key in ("outer", "inner", "method") for found in presets_of(item.get(key, []))
    ]
    return [PRESETS[name] for name in named] + inside


def _composed(document: Document, data: Any, place: Place) -> Composition:
    if len(place) > MAX_DEPTH:
        raise document.error(place[:4], f"nested deeper than {MAX_DEPTH} levels.")
    several = isinstance(data, list | tuple)
    items = data if several else [] if data is None else [data]
    methods = [
        method
        for index, item in enumerate(items)
        for method in _item(document, item, (*place, index) if several else place)
    ]
    if not methods:
        raise document.error(place, "no method is left. List at least one, for example: - name: clip_higher")
    try:
        return compose(*methods)
    except Conflict as error:
        raise Conflict(document.text(place, str(error))) from None


def _item(document: Document, item: Any, place: Place) -> list[TokenObjective]:
    if isinstance(item, str):
        return [_method(document, item, {}, place)]
    if not isinstance(item, Mapping):
        raise document.error(place, f"expected a method, for example {{name: s2t}}, not {shown(item)}.")
    if "preset" in item:
        return _preset(document, item, place)
    if "name" not in item:
        raise document.error(place, "a method needs its `name`, or `preset` for a recipe.")
    if item["name"] == "within":
        parts = document.validate(WithinItem, dict(item), place)
        assert isinstance(parts, WithinItem)
        outer = _composed(document, parts.outer, (*place, "outer"))
        return [_within(document, outer, _composed(document, parts.inner, (*place, "inner")), place)]
    if item["name"] == "observe":
        part = document.validate(ObserveItem, dict(item), place)
        assert isinstance(part, ObserveItem)
        return [_observed(document, one, place) for one in _composed(document, part.method, (*place, "method")).members]
    return [_method(document, item["name"], {key: item[key] for key in item if key != "name"}, place)]


def _observed(document: Document, method: TokenObjective, place: Place) -> TokenObjective:
    try:
        return observe(method)
    except Conflict as error:
        raise Conflict(document.text(place, str(error))) from None


def _within(document: Document, outer: TokenObjective, inner: TokenObjective, place: Place) -> TokenObjective:
    try:
        return within(_single(outer), _single(inner))
    except Conflict as error:
        raise Conflict(document.text(place, str(error))) from None


def _single(method: TokenObjective) -> TokenObjective:
    return method.members[0] if isinstance(method, Composition) and len(method.members) == 1 else method


def _method(document: Document, name: Any, settings: Mapping[Any, Any], place: Place) -> TokenObjective:
    if not isinstance(name, str):
        raise document.error((*place, "name"), f"expected the name of a method, not {shown(name)}.")
    if is_own(name):
        base: type[TokenObjective] = TokenObjective  # type: ignore[type-abstract]  # what the class inherits from
        return made(document, load_method(document, name, (*place, "name"), METHODS, base, "method"), settings, place)
    try:
        cls = METHODS.get(name)
    except UnknownName as error:
        told = str(error)
        if name in PRESETS:
            told = f"no method is called '{name}', it is a preset: write {{preset: {name}}}."
        elif name in STAGES.names():
            told = f"no method is called '{name}', it is a stage: list it under `stages`."
        raise document.error((*place, "name"), told) from error
    return made(document, cls, settings, place)


def _preset(document: Document, item: Mapping[Any, Any], place: Place) -> list[TokenObjective]:
    checked = document.validate(PresetItem, dict(item), place)
    assert isinstance(checked, PresetItem)
    try:
        recipe = preset(checked.preset)
    except UnknownName as error:
        raise document.error((*place, "preset"), str(error)) from error
    names = [leaf.name for leaf in walk(recipe.objective)]
    for place_of, name in [
        *(((*place, "set", name), name) for name in checked.set),
        *(((*place, "drop", index), name) for index, name in enumerate(checked.drop)),
    ]:
        if name not in names:
            text = f"the preset '{checked.preset}' has no method '{name}'. {did_you_mean(name, names)}"
            raise document.error(place_of, text)
    members = recipe.objective.members if isinstance(recipe.objective, Composition) else (recipe.objective,)
    adapted = (_adapted(document, one, checked, place) for one in members)
    return [one for one in adapted if one is not None]


def _adapted(document: Document, method: TokenObjective, item: PresetItem, place: Place) -> TokenObjective | None:
    """A method of a recipe with the settings that ``item`` changes; None where ``item`` drops it."""
    if isinstance(method, Within):
        outer = _adapted(document, method.outer, item, place)
        inner = _adapted(document, method.inner, item, place)
        if outer is None or inner is None:
            return inner if outer is None else outer
        return _within(document, outer, inner, place)
    if isinstance(method, Observe):
        inside = _adapted(document, method.method, item, place)
        return None if inside is None else observe(inside)
    if method.name in item.drop:
        return None
    if method.name not in item.set:
        return method
    settings = {**settings_as_yaml(method), **item.set[method.name]}
    return _method(document, method.name, settings, (*place, "set", method.name))


def dump_objective(objective: TokenObjective) -> list[dict[str, Any]]:
    """The canonical form: every setting of every method, in the order of the composition."""
    members = objective.members if isinstance(objective, Composition) else (objective,)
    return [_dump(one) for one in members]


def _dump(method: TokenObjective) -> dict[str, Any]:
    if isinstance(method, Within):
        return {"name": method.name, "outer": _part(method.outer), "inner": _part(method.inner)}
    if isinstance(method, Observe):
        return {"name": method.name, "method": _part(method.method)}
    return {"name": name_in_yaml(method), **settings_as_yaml(method)}


def _part(method: TokenObjective) -> dict[str, Any] | list[dict[str, Any]]:
    return dump_objective(method) if isinstance(method, Composition) else _dump(method)


def objective_hash(objective: TokenObjective) -> str:
    """Twelve hexadecimal digits; two objectives share them exactly when methods and settings are the same.

    Of a method in a file of the user's own, what counts is the name of the file and of the class.
    """
    return digest(short(dump_objective(objective)))


def digest(data: Any) -> str:
    """The first twelve hexadecimal digits of the SHA-256 of the canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
