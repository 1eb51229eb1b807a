"""Methods and stages in YAML, both ways: lists of names with settings, presets, `within` and `observe`.

::

    objective:
      - preset: dapo                     # a recipe, in place
        set: {clip_higher: {high: 0.3}}  # with other settings
        drop: [token_mean]               # or without a part of it
      - {name: s2t, max_prob: 0.01}      # and more methods
      - name: within                     # the explicit exception: stare sees only the tokens that s2t keeps
        outer: {name: s2t}
        inner: {name: stare}             # or a list of methods
      - {name: observe, method: {name: lp_reg}}    # measured and reported, without effect
      - {name: methods.py:SpareForks, share: 0.2}  # a user-defined class
    stages:
      - {name: goldilocks, pool: 256}   # which prompts
      - overlong                        # reward shapers, any number
      - {name: grpo, std: false}        # the advantage
      - {name: deep_grpo, branches: 4}  # more responses

By default, the stages are ``in_order`` and ``grpo``, or those that the presets bring.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, create_model

from rlstab.config.allowed_changes import digest
from rlstab.config.document import MAX_DEPTH, Document, Keys, kind_of_file, shown
from rlstab.config.settings import Settings
from rlstab.config.user_classes import load_method, make, name_in_yaml
from rlstab.config.user_code import is_user_code, located, portable
from rlstab.config.validation import require_kind, together, unknown_name, validate
from rlstab.core.compose import Composition, Observe, Within, compose, observe, walk, within
from rlstab.core.metadata import docstring
from rlstab.core.method import Method
from rlstab.core.method_settings import Range, settings_of
from rlstab.core.objective import TokenObjective, check_complete
from rlstab.core.registry import Registry
from rlstab.errors import ConfigError, Conflict, did_you_mean
from rlstab.files import exists
from rlstab.presets import PRESETS, Preset
from rlstab.stages import STAGES
from rlstab.stages.pipeline import Pipeline
from rlstab.stages.stage import AdvantageEstimator, PromptSelector, Stage
from rlstab.zoo import METHODS

Kind = TypeVar("Kind", bound=Method[Any])


class PresetItem(Settings):
    """A recipe in place."""

    preset: str
    set: dict[str, dict[str, Any]] = Field({})
    drop: list[str] = Field([])


class ObserveItem(Settings):
    """``method`` is measured and reported, and changes nothing."""

    name: Literal["observe"]
    method: Any


class WithinItem(Settings):
    """``inner`` sees only the tokens that ``outer`` keeps."""

    name: Literal["within"]
    outer: Any
    inner: Any


def _listed(data: Any, keys: Keys) -> list[tuple[Any, Keys]]:
    """The items of a list with their keys; a single item is accepted where a list is expected."""
    if isinstance(data, list | tuple):
        return [(item, (*keys, index)) for index, item in enumerate(data)]
    return [] if data is None else [(data, keys)]


# -- one method or stage -----------------------------------------------------------------------------------------------


@cache
def method_model(cls: type[Method[Any]]) -> type[BaseModel]:
    """The pydantic model of a method or stage: its ``name``, then its settings with their ranges and defaults."""
    fields: dict[str, Any] = {"name": (Literal[cls.name], cls.name)}
    for setting in settings_of(cls):
        limits: dict[str, Any] = vars(setting.range or Range())
        default = ... if setting.default is MISSING else setting.default
        fields[setting.name] = setting.hint, Field(default, **limits)
    return create_model(cls.__name__, __base__=Settings, __doc__=docstring(cls).partition("\n")[0], **fields)


def _item(document: Document, item: Any, keys: Keys, registry: Registry[Any]) -> Mapping[Any, Any]:
    """An item of a list as a mapping with a name, or a preset."""
    item = {"name": item} if isinstance(item, str) else item
    if isinstance(item, Mapping) and (isinstance(item.get("name"), str) or ("preset" in item and registry is METHODS)):
        return item
    where = (*keys, "name") if isinstance(item, Mapping) and "name" in item else keys
    example = f"{{name: {registry.names()[0]}}}{' or {preset: dapo}' if registry is METHODS else ''}"
    if isinstance(item, Mapping) and (name := next(iter(item), "")) in {*registry.names(), "within", "observe"}:
        example = f"{{name: {name}, SETTING: ...}}"
    raise document.error(where, f"expected a {registry.noun}, for example {example}, not {shown(item)}.")


def _made(document: Document, item: Any, keys: Keys, registry: Registry[Kind]) -> Kind:
    """The method or stage of an item."""
    settings = dict(_item(document, item, keys, registry))
    name = settings.pop("name")
    if is_user_code(name):
        cls = load_method(document, name, (*keys, "name"), registry)
    else:
        if name not in registry.names():
            hint = unknown_name(name, registry.names())
            raise document.error((*keys, "name"), f"no {registry.noun} is called '{name}'. {hint}")
        cls = registry.get(name)
    return _of_class(document, cls, settings, keys)


def _of_class(document: Document, cls: type[Kind], settings: Mapping[Any, Any], keys: Keys) -> Kind:
    checked = validate(document, method_model(cls), {"name": cls.name, **settings}, keys)
    with document.at(keys):
        return make(cls, {setting.name: getattr(checked, setting.name) for setting in settings_of(cls)})


def settings_as_yaml(method: Method[Any]) -> dict[str, Any]:
    """Settings by name, as YAML has them."""
    values = {}
    for setting in settings_of(type(method)):
        value = values[setting.name] = getattr(method, setting.name)
        if float in setting.kinds and int not in setting.kinds and isinstance(value, int | float):
            values[setting.name] = float(value) + 0.0  # equal numbers look equal: 1 becomes 1.0, and -0.0 becomes 0.0
    return values


def at_defaults(name: str, length: int) -> dict[str, Any]:
    """A shipped method in YAML, with its ``length`` setting if it has one."""
    has_length = "length" in {setting.name for setting in settings_of(METHODS.get(name))}
    return {"name": name} | ({"length": length} if has_length else {})


# -- objective ---------------------------------------------------------------------------------------------------------


def load_objective(source: str | Path | Mapping[str, Any] | Sequence[Any]) -> Composition:
    """See :func:`rlstab.load_objective`."""
    if isinstance(source, str) and re.fullmatch(r"\w+", source) and not exists(source):
        source = {"preset" if source in PRESETS else "name": source}
    document = Document.read(source) if isinstance(source, str | Path) else Document(source)
    require_kind(document, "objective")
    if kind_of_file(document.data) == "objective":
        document = Document({}, document.name, {}).replaced("objective", document)
    return build_objective(located(document))


def build_objective(document: Document) -> Composition:
    """The composition under the key ``objective`` of a document that is a mapping.

    Raises:
        ConfigError: with file and line.
        Conflict: the methods do not fit together.
    """
    if "objective" not in document.data:
        raise document.error((), "the key `objective` is missing. List the methods of the loss, or name a preset.")
    composition = _composed(document, document.data["objective"], ("objective",))
    check_complete(composition)
    return composition


def presets_of(data: Any) -> list[Preset]:
    """The presets that an objective names, in order; unknown names are left out."""
    if isinstance(data, list | tuple):
        return [recipe for item in data for recipe in presets_of(item)]
    if not isinstance(data, Mapping):
        return []
    nested = [data[key] for key in ("outer", "inner", "method") if key in data]
    name = data.get("preset")
    return ([PRESETS[name]] if isinstance(name, str) and name in PRESETS else []) + presets_of(nested)


def _composed(document: Document, data: Any, keys: Keys) -> Composition:
    if len(keys) > MAX_DEPTH:
        raise document.error(keys[:4], f"nested deeper than {MAX_DEPTH} levels.")
    items, hint = _listed(data, keys), ""
    method_lists = together(partial(_methods, document, item, its_keys) for item, its_keys in items)
    methods = [method for item_methods in method_lists for method in item_methods]
    for (item, _), item_methods in zip(items, method_lists, strict=True):
        if item_methods and isinstance(item, Mapping) and "preset" in item:
            brought = [leaf.name for method in item_methods for leaf in walk(method)]
            cure = f"{{preset: {item['preset']}, drop: [{brought[0]}]}}, or change it by set: {{{brought[0]}: {{...}}}}"
            hint += f"\n  The preset '{item['preset']}' brings {', '.join(brought)}. Leave one out by {cure}."
    if not methods:
        raise document.error(keys, "no method is left. List at least one, for example: - name: clip_higher")
    with document.at(keys, hint if len(items) > 1 else ""):
        return compose(*methods)


def _methods(document: Document, item: Any, keys: Keys) -> list[TokenObjective]:
    item = _item(document, item, keys, METHODS)
    if "preset" in item:
        return _preset(document, item, keys)
    if item["name"] == "within":
        parts = validate(document, WithinItem, dict(item), keys)
        outer = _composed(document, parts.outer, (*keys, "outer"))
        inner = _composed(document, parts.inner, (*keys, "inner"))
        with document.at(keys):
            return [within(_single(outer), _single(inner))]
    if item["name"] == "observe":
        part = validate(document, ObserveItem, dict(item), keys)
        members = _composed(document, part.method, (*keys, "method")).members
        with document.at(keys):
            return [observe(method) for method in members]
    return [_made(document, item, keys, METHODS)]


def _single(objective: TokenObjective) -> TokenObjective:
    return objective.members[0] if isinstance(objective, Composition) and len(objective.members) == 1 else objective


def _preset(document: Document, item: Mapping[Any, Any], keys: Keys) -> list[TokenObjective]:
    checked = validate(document, PresetItem, dict(item), keys)
    if checked.preset not in PRESETS:
        hint = unknown_name(checked.preset, sorted(PRESETS))
        raise document.error((*keys, "preset"), f"no preset is called '{checked.preset}'. {hint}")
    recipe = PRESETS[checked.preset]
    names = [leaf.name for leaf in walk(recipe.objective)]
    changed = {("set", name): name for name in checked.set} | {("drop", n): name for n, name in enumerate(checked.drop)}
    text = f"the preset '{checked.preset}' has no method"
    wrong = {(*keys, *step): name for step, name in changed.items() if name not in names}
    if wrong:
        hints = {name: did_you_mean(name, names) for name in wrong.values()}
        lines = [document.text(step, f"{text} '{name}'. {hints[name]}") for step, name in wrong.items()]
        raise ConfigError("\n".join(lines))
    adapted = (_adapted(document, method, checked, keys) for method in recipe.objective.members)
    return [method for method in adapted if method is not None]


def _adapted(document: Document, method: TokenObjective, item: PresetItem, keys: Keys) -> TokenObjective | None:
    """A method of a recipe with the settings that ``item`` changes; None if ``item`` drops it."""
    if isinstance(method, Within):
        outer = _adapted(document, method.outer, item, keys)
        inner = _adapted(document, method.inner, item, keys)
        if outer is None or inner is None:
            return inner if outer is None else outer
        with document.at(keys):
            return within(_single(outer), _single(inner))
    if method.name in item.drop:
        return None
    if method.name not in item.set:
        return method
    changed = {**settings_as_yaml(method), **item.set[method.name]}
    return _of_class(document, type(method), changed, (*keys, "set", method.name))


def dump_objective(objective: TokenObjective) -> list[dict[str, Any]]:
    """The canonical form: every setting of every method, in the order of the composition."""
    members = objective.members if isinstance(objective, Composition) else (objective,)
    return [_dump(method) for method in members]


def _dump(method: TokenObjective) -> dict[str, Any]:
    if isinstance(method, Within):
        return {"name": method.name, "outer": _part(method.outer), "inner": _part(method.inner)}
    if isinstance(method, Observe):
        return {"name": method.name, "method": _part(method.method)}
    return {"name": name_in_yaml(method), **settings_as_yaml(method)}


def _part(method: TokenObjective) -> dict[str, Any] | list[dict[str, Any]]:
    return dump_objective(method) if isinstance(method, Composition) else _dump(method)


def objective_hash(objective: TokenObjective) -> str:
    """Twelve hexadecimal digits that two objectives share exactly if their methods and settings are the same.

    A user-defined method counts by the names of its file and class.
    """
    return digest(portable(dump_objective(objective)))


# -- stages ------------------------------------------------------------------------------------------------------------


def build_stages(document: Document, recipes: Sequence[Preset]) -> Pipeline:
    """The stages under the key ``stages`` of a run, and those of its presets.

    Args:
        document: a mapping.
        recipes: the presets of its objective; the stages of the run come before theirs.

    Raises:
        ConfigError: with file and line.
        Conflict: stages do not fit together, or presets bring different ones.
    """
    items = _listed(document.data.get("stages"), ("stages",))
    stages = together(partial(_made, document, item, keys, STAGES) for item, keys in items)
    with document.at(("stages",) if "stages" in document.data else ("objective",)):
        return Pipeline.of(*stages, *_brought(recipes, stages))


def dump_stages(pipeline: Pipeline) -> list[dict[str, Any]]:
    """The canonical form: every stage with every setting, in the order of a rollout."""
    return [{"name": name_in_yaml(stage), **settings_as_yaml(stage)} for stage in pipeline]


def _brought(recipes: Sequence[Preset], named: Sequence[Stage]) -> list[Stage]:
    """The stages of the presets, except those that the run names itself and kinds that occur once and that it has."""
    kinds = (PromptSelector, AdvantageEstimator)
    taken = tuple(kind for kind in kinds if any(isinstance(stage, kind) for stage in named))
    brought: dict[str, Stage] = {}
    for stage in (stage for recipe in recipes for stage in (*recipe.stages, STAGES.get(recipe.estimator)())):
        if isinstance(stage, taken) or any(stage.name == other.name for other in named):
            continue
        if brought.setdefault(stage.name, stage) != stage:
            raise Conflict(f"the presets bring '{stage.name}' with different settings. List it under `stages`.")
    return list(brought.values())
