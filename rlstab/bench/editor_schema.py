"""A JSON Schema of bench files, for editors that complete and check YAML."""

from __future__ import annotations

from typing import Any

from rlstab.bench.file import NAME, BenchFile, MethodEntry
from rlstab.config.editor_schema import json_schema


def bench_schema() -> dict[str, Any]:
    """The schema of a bench file, with every method that is known now."""
    run, schema = json_schema(), BenchFile.model_json_schema()
    objective = run["properties"]["objective"]
    entry = MethodEntry.model_json_schema()
    entry["properties"]["objective"] = objective
    base = {key: run[key] for key in ("type", "properties", "additionalProperties")}
    description = schema["properties"]["base"]["description"]
    schema["properties"]["base"] = {"anyOf": [{"type": "string"}, base, {"type": "null"}], "description": description}
    schema["properties"]["methods"]["additionalProperties"] = {"anyOf": [objective, entry]}
    schema["properties"]["stack"]["items"] = {"$ref": "#/$defs/objective_item"}
    schema["properties"]["name"]["pattern"] = f"^{NAME.pattern}$"
    for key in ("methods", "settings"):
        schema["properties"][key]["propertyNames"] = {"pattern": f"^{NAME.pattern}$"}
    schema["$defs"] = {**schema.get("$defs", {}), **run["$defs"]}
    return {"$schema": run["$schema"], **schema, "title": "rlstab bench"}
