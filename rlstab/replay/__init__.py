"""Replay: what the loss of a run was, and what every method would have done to its tokens."""

from rlstab.record import Dump, Step, load, read_dump

__all__ = ["Dump", "Step", "load", "read_dump"]
