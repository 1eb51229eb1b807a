"""The record of an optimizer step: written by every trainer, read by every page.

``files`` finds it; ``step`` is the container; ``writer`` and ``reader`` write and read its two files per rank.
``foreign``, with ``prime_rl``, ``nemo_rl`` and ``slime``, reads the files of other trainers. ``effects`` says what each
method did to each token, and ``token_texts`` gives each token its text.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlstab.record.effects import ACTIONS, MethodTrace, Trace, trace
    from rlstab.record.reader import Dump, load, read_dump
    from rlstab.record.step import Header, HostLoss, Step
    from rlstab.record.writer import write_dump

__all__ = [
    "ACTIONS",
    "Dump",
    "Header",
    "HostLoss",
    "MethodTrace",
    "Step",
    "Trace",
    "load",
    "read_dump",
    "trace",
    "write_dump",
]


def __getattr__(name: str) -> Any:
    """Each name when it is first used: ``files`` is read by what starts without torch."""
    for home in ("step", "effects", "reader", "writer") if name in __all__ else ():
        if hasattr(module := import_module(f"rlstab.record.{home}"), name):
            return getattr(module, name)
    raise AttributeError(name)
