"""Replay: what the loss of a run was, and what every method would have done to its tokens."""

from rlstab.replay.dumps import Dump, load, read_dump
from rlstab.replay.steps import Step

__all__ = ["Dump", "Step", "load", "read_dump"]
