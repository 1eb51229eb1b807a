"""A JSON Schema of run files, for editors that complete and check YAML."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from rlstab.config.methods import method_model
from rlstab.config.run import RunConfig
from rlstab.presets import PRESETS
from rlstab.zoo import METHODS


def json_schema() -> dict[str, Any]:
    """The schema of a run file, with every method that is known now."""
    schema = RunConfig.model_json_schema()
    names = METHODS.names()
    definitions = schema["$defs"]
    for name in names:
        definitions[f"method.{name}"] = {
            **TypeAdapter(method_model(METHODS.get(name))).json_schema(ref_template="#/$defs/{model}")
        }
        definitions[f"method.{name}"].setdefault("required", []).append("name")
    item = {"$ref": "#/$defs/objective_item"}
    definitions["objective_item"] = {
        "anyOf": [
            {"enum": names},
            *({"$ref": f"#/$defs/method.{name}"} for name in names),
            {
                "type": "object",
                "description": "a recipe in place",
                "properties": {
                    "preset": {"enum": sorted(PRESETS)},
                    "set": {"type": "object", "propertyNames": {"enum": names}},
                    "drop": {"type": "array", "items": {"enum": names}},
                },
                "required": ["preset"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "description": "inner sees only the tokens that outer keeps",
                "properties": {"name": {"const": "within"}, "outer": item, "inner": item},
                "required": ["name", "outer", "inner"],
                "additionalProperties": False,
            },
        ]
    }
    schema["properties"]["objective"] = {"anyOf": [{"type": "array", "items": item, "minItems": 1}, item]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "rlstab run", **schema}
