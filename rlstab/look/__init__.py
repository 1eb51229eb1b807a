"""One look at a run: what went wrong first, whether the loss was what it said, and what each method would have done."""

from rlstab.logs.watch import Watch
from rlstab.look.watch import WatchCallback

__all__ = ["Watch", "WatchCallback"]
