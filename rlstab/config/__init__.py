"""Configuration: YAML in, checked settings and objectives out, and back."""

from rlstab.config.document import Document
from rlstab.config.editor_schema import json_schema
from rlstab.config.identity import run_hash
from rlstab.config.objectives import dump_objective, load_objective, objective_hash
from rlstab.config.runs import RunConfig, dump_run, load_run

__all__ = [
    "Document",
    "RunConfig",
    "dump_objective",
    "dump_run",
    "json_schema",
    "load_objective",
    "load_run",
    "objective_hash",
    "run_hash",
]
