"""A JSON Schema of run files, for editors that complete and check YAML."""

from importlib.metadata import entry_points
from typing import Any

from pydantic import BaseModel

from rlstab.config.objectives import ObserveItem, PresetItem, WithinItem, method_model
from rlstab.config.runs import RunConfig
from rlstab.config.settings import TASK_GROUP
from rlstab.core.registry import Registry
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.zoo import METHODS

#: A user-defined class in a file; only the file knows its settings.
_USER_NAME = {"type": "string", "pattern": r"\.py:[A-Za-z_]", "description": "path/to/file.py:Name of a class"}
_USER = {"type": "object", "properties": {"name": _USER_NAME}, "required": ["name"]}


def json_schema() -> dict[str, Any]:
    """The schema of a run file, with every method that is known now."""
    schema = RunConfig.model_json_schema()
    definitions, properties = schema["$defs"], schema["properties"]
    tasks = [{**task, "required": ["name"]} for task in properties["task"]["oneOf"]]
    installed = [point.name for point in entry_points(group=TASK_GROUP)]
    user_task = {**_USER, "properties": {"name": {"anyOf": [_USER_NAME, {"enum": installed}]}}}
    properties["task"]["oneOf"] = [*tasks, user_task]
    methods = _listed("objective_item", minItems=1)
    settings = {name: {"$ref": f"#/$defs/method.{name}"} for name in METHODS.names()}
    definitions["objective_item"] = _item("method", METHODS, definitions)
    definitions["objective_item"]["anyOf"] += [
        _with(
            PresetItem,
            preset={"enum": sorted(PRESETS)},
            set={"type": "object", "properties": settings, "additionalProperties": False},
            drop={"type": "array", "items": {"enum": METHODS.names()}},
        ),
        _with(ObserveItem, method=methods),
        _with(WithinItem, outer=methods, inner=methods),
    ]
    definitions["stage_item"] = _item("stage", STAGES, definitions)
    properties["objective"] = methods
    properties["stages"] = {"description": "what acts outside the loss", **_listed("stage_item")}
    schema["required"].remove("stages")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rlstab run", **schema}


def _listed(item: str, **constraints: Any) -> dict[str, Any]:
    """A list of items, or a single item."""
    reference = {"$ref": f"#/$defs/{item}"}
    return {"anyOf": [{"type": "array", "items": reference, **constraints}, reference]}


def _item(kind: str, registry: Registry[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A method or a stage by its name, with or without settings; adds the definition of each to the others."""
    names, options = registry.names(), []
    for name in names:
        cls: Any = registry.get(name)
        definition = definitions[f"{kind}.{name}"] = method_model(cls).model_json_schema()
        # a preset refers to it too, and already has the required settings
        options.append({"$ref": f"#/$defs/{kind}.{name}", "required": ["name", *definition.pop("required", [])]})
    return {"anyOf": [{"enum": names}, _USER_NAME, *options, _USER]}


def _with(model: type[BaseModel], **properties: Any) -> dict[str, Any]:
    """The schema of an item, with properties that only the registries know."""
    schema = model.model_json_schema()
    return {**schema, "properties": schema["properties"] | properties}
