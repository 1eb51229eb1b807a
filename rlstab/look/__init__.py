"""One look at a run: what went wrong first, whether the loss was as stated, and what each method would have done."""

from typing import TYPE_CHECKING, Any

from rlstab.logs.watch import Watch

if TYPE_CHECKING:
    from rlstab.look.callback import WatchCallback

__all__ = ["Watch", "WatchCallback"]


def __getattr__(name: str) -> Any:
    if name == "WatchCallback":  # its base class takes seconds to import, and nothing else here needs it
        from rlstab.look.callback import WatchCallback

        return WatchCallback
    raise AttributeError(name)
