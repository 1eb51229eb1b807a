"""A log that is followed: the signs of a run of any trainer, reported as they appear."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from rlstab.errors import ReportError
from rlstab.logs.watch import Watch, told
from rlstab.look.find import read_logs


def follow(
    path: Path,
    tell: Callable[[str], None],
    *,
    stop_at: Collection[str] = (),
    every: float = 10.0,
    goes_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Read a log repeatedly, and report each new sign.

    Args:
        path: of one run; it need not exist yet.
        tell: prints a line.
        stop_at: names of signs at which to stop.
        every: seconds between two readings.
        goes_on: asked after each reading.

    Returns:
        whether a sign of ``stop_at`` appeared.

    Raises:
        ReportError: several runs are logged there.
    """
    watch = Watch()
    while True:
        try:
            logs = read_logs(path)
        except ReportError:  # nothing there so far, or half a line
            logs = []
        if len(logs) > 1:
            raise ReportError(f"{path}: {len(logs)} runs are logged there. Give the path of one of them.")
        for log in logs:
            for sign in watch.new(log):
                tell(told(sign, log.unit))
        if set(stop_at) & watch.seen.keys():
            return True
        if not goes_on():
            return False
        time.sleep(every)
