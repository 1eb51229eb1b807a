"""Configuration: YAML in, checked settings and objectives out, and back.

Every name is imported when it is first used: code that only reads files of runs does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlstab.config.allowed_changes import run_hash
    from rlstab.config.document import Document
    from rlstab.config.editor_schema import json_schema
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


def __getattr__(name: str) -> Any:
    for home in ("document", "allowed_changes", "objectives", "runs", "editor_schema") if name in __all__ else ():
        module = import_module(f"rlstab.config.{home}")
        if name in vars(module):
            return globals().setdefault(name, vars(module)[name])
    raise AttributeError(f"module 'rlstab.config' has no attribute '{name}'")
