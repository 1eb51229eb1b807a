"""One look at a run: what went wrong first, whether the loss was what it said, and what each method would have done."""

from rlstab.look.watch import Watch, WatchCallback

__all__ = ["Watch", "WatchCallback"]
