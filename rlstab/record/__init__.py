"""The record of an optimizer step: written by every trainer, read by every page.

``step`` is the container; ``writer`` and ``reader`` write and read its two files per rank, which are found by
:mod:`rlstab.dump_files`. ``foreign``, with ``prime_rl``, ``nemo_rl`` and ``slime``, reads the files of other trainers.
``effects`` says what each method did to each token, and ``token_texts`` gives each token its text.
"""

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
