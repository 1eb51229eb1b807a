"""What each method did to each token of a step, and the file in which a run keeps it."""

from rlstab.trace.effects import ACTIONS, MethodTrace, Trace, trace

__all__ = ["ACTIONS", "MethodTrace", "Trace", "trace"]
