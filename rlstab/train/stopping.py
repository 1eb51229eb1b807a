"""SIGINT and SIGTERM: a run ends at a place where a checkpoint can be written."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

#: A signal that comes again later than this ends the run at once; earlier it is the same one, passed on by a launcher.
AGAIN = 1.0


class Dropped(BaseException):
    """What was being done is dropped, because a signal asks to end."""


class Stopped(KeyboardInterrupt):
    """A signal ended the run in an orderly way.

    Attributes:
        number: of the signal.
        checkpoint: to continue from; None where nothing was completed.
    """

    def __init__(self, number: int, rollout: int, rollouts: int, checkpoint: Path | None) -> None:
        self.number, self.checkpoint = number, checkpoint
        name = signal.Signals(number).name
        where = f"after rollout {rollout} of {rollouts}" if rollout else "before the first rollout was complete"
        kept = f"the checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        super().__init__(f"stopped by {name} {where}; {kept}")


class Stop:
    """While it is entered, a first SIGINT or SIGTERM drops what is being done, or waits until it may be dropped.

    Handlers that the caller installed stay. Outside the main thread there is nothing to install.

    Args:
        drop: whether to raise :class:`Dropped`; where several processes must agree, they ask :attr:`number` instead.

    Attributes:
        number: of the signal that asks to end; 0 while none does.
    """

    def __init__(self, *, drop: bool) -> None:
        self.number = 0
        self._drop, self._holding = drop, False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
            for number, handler in usual.items():
                if signal.getsignal(number) == handler:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """What is inside is completed before a signal has its effect."""
        self.hold()
        yield
        self.release()

    def hold(self) -> None:
        """From here to :meth:`release`, a signal waits."""
        self._holding = True

    def release(self) -> None:
        """A signal may have its effect; one that waited has it now."""
        self._holding = False
        self._perhaps()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number and now - self._since > AGAIN:
            raise KeyboardInterrupt
        if not self.number:
            self.number, self._since = number, now
            self._perhaps()

    def _perhaps(self) -> None:
        if self.number and self._drop and not self._holding:
            raise Dropped
