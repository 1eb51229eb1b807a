"""What a bench file says: every method explained, and a JSON Schema for editors that complete and check YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlstab.bench.file import NAME, BenchFile, BenchRun, MethodEntry, load_bench
from rlstab.bench.launch import Launch
from rlstab.config import Document, RunConfig, load_objective
from rlstab.config.document import kind_of_file
from rlstab.config.editor_schema import json_schema
from rlstab.core.compose import Composition
from rlstab.errors import ConfigError
from rlstab.explain.explanation import page


def bench_page(source: str, overrides: Mapping[str, Any]) -> str:
    """The pages of all methods of a bench file, as Markdown.

    Raises:
        ConfigError: see :func:`rlstab.bench.file.load_bench`; or there are overrides, which a bench takes in its file.
    """
    if overrides:
        raise ConfigError(f"{source}: a bench takes no --set. Write {', '.join(overrides)} under its base or settings.")
    bench = load_bench(source)
    settings, methods = list(bench.file.settings), list(bench.file.methods)
    first = settings[0]
    others = f", the first of {len(settings)} settings" if len(settings) > 1 else ""
    pages = {run.method: page(run.method, *_explained(run)) for run in bench.runs[::-1] if run.setting == first}
    head = f"# {source}\n\nBench {bench.file.name}, baseline {bench.file.baseline}. Each method at {first}{others}."
    nested = [re.sub(r"(?m)^#", "##", pages[name]) for name in methods if name in pages]
    return "\n\n".join([head, *nested])


def _explained(run: BenchRun) -> tuple[Composition, RunConfig | None]:
    """The objective, and the run where rlstab's trainer makes it."""
    if isinstance(run.config, Launch):
        return load_objective(run.config.objective), None
    return run.config.composition, run.config


def is_bench(source: str) -> bool:
    """Whether a file is a bench file."""
    return kind_of_file(Document.read(source).data) == "bench"


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
