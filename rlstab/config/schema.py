"""A JSON Schema of run files, for editors that complete and check YAML."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from pydantic import TypeAdapter

from rlstab.config.objectives import method_model
from rlstab.config.runs import RunConfig
from rlstab.config.settings import TASK_GROUP, AdvantageSettings
from rlstab.presets import PRESETS
from rlstab.stages import STAGES
from rlstab.zoo import METHODS

#: A class of the user's own, in a file; what its settings are, only the file says.
_OWN_NAME = {"type": "string", "pattern": r"\.py:[A-Za-z_]", "description": "path/to/file.py:Name of a class"}
_OWN = {"type": "object", "properties": {"name": _OWN_NAME}, "required": ["name"]}


def json_schema() -> dict[str, Any]:
    """The schema of a run file, with every method that is known now."""
    schema = RunConfig.model_json_schema()
    names = METHODS.names()
    definitions = schema["$defs"]
    task = schema["properties"]["task"]
    for one in task["oneOf"]:
        _needs_name(definitions[one["$ref"].rpartition("/")[2]])
    installed = [one.name for one in entry_points(group=TASK_GROUP)]
    task["oneOf"].append({**_OWN, "properties": {"name": {"anyOf": [_OWN_NAME, {"enum": installed}]}}})
    for name in names:
        definitions[f"method.{name}"] = _needs_name(TypeAdapter(method_model(METHODS.get(name))).json_schema())
    item = {"$ref": "#/$defs/objective_item"}
    methods = {"anyOf": [{"type": "array", "items": item, "minItems": 1}, item]}
    definitions["objective_item"] = {
        "anyOf": [
            {"enum": names},
            _OWN_NAME,
            *({"$ref": f"#/$defs/method.{name}"} for name in names),
            _OWN,
            {
                "type": "object",
                "description": "a recipe in place",
                "properties": {
                    "preset": {"enum": sorted(PRESETS)},
                    "set": {
                        "type": "object",
                        "properties": {name: {"$ref": f"#/$defs/settings.{name}"} for name in names},
                        "additionalProperties": False,
                    },
                    "drop": {"type": "array", "items": {"enum": names}},
                },
                "required": ["preset"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "description": "method is measured and reported, and changes nothing",
                "properties": {"name": {"const": "observe"}, "method": methods},
                "required": ["name", "method"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "description": "inner sees only the tokens that outer keeps",
                "properties": {"name": {"const": "within"}, "outer": methods, "inner": methods},
                "required": ["name", "outer", "inner"],
                "additionalProperties": False,
            },
        ]
    }
    for name in names:
        definitions[f"settings.{name}"] = {
            key: value for key, value in definitions[f"method.{name}"].items() if key != "required"
        }
    schema["properties"]["objective"] = methods
    schema["properties"]["stages"] = _stages(definitions)
    schema["properties"]["advantage"] = AdvantageSettings.model_json_schema()
    schema["required"].remove("stages")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rlstab run", **schema}


def _stages(definitions: dict[str, Any]) -> dict[str, Any]:
    """What ``stages`` may hold; the definition of each stage joins the others."""
    names = STAGES.names()
    for name in names:
        definitions[f"stage.{name}"] = _needs_name(TypeAdapter(method_model(STAGES.get(name))).json_schema())
    definitions["stage_item"] = {
        "anyOf": [{"enum": names}, _OWN_NAME, *({"$ref": f"#/$defs/stage.{name}"} for name in names), _OWN]
    }
    item = {"$ref": "#/$defs/stage_item"}
    return {"description": "what acts outside the loss", "anyOf": [{"type": "array", "items": item}, item]}


def _needs_name(definition: dict[str, Any]) -> dict[str, Any]:
    definition["required"] = sorted({"name", *definition.get("required", [])})
    return definition
