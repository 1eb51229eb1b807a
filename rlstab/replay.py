"""The reader of dumps by its earlier name, for one release: :mod:`rlstab.record`."""

from rlstab.record import Dump, Step, load, read_dump

__all__ = ["Dump", "Step", "load", "read_dump"]
