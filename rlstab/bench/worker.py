"""One run in a process of its own, which ends with the process that started it.

The order is a line of JSON on standard input. Standard input then stays open for as long as the parent lives: its end
ends the worker, however the parent died.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from rlstab.bench.record import update_record
from rlstab.errors import RlstabError

#: Lines of an error that are kept.
LINES = 12

#: Exit code of a worker whose parent is gone.
ORPHANED = 3


class _Clock:
    """Time that the run took, with the attempts before; None where that is not known."""

    def __init__(self, before: dict[str, float | None]) -> None:
        self._before, self._start = before, time.perf_counter()

    def read(self) -> dict[str, float | None]:
        """``seconds`` of wall time and ``cpu_seconds``, user and system, of all threads of this process."""
        now = {"seconds": time.perf_counter() - self._start, "cpu_seconds": time.process_time()}
        return {
            name: None if (before := self._before[name]) is None else round(before + spent, 3)
            for name, spent in now.items()
        }


def main() -> int:
    """Read the order, train, record how it ended.

    The order holds ``run`` (a resolved run), ``resume``, ``keep_checkpoints`` and ``spent``, the seconds of the
    attempts before.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    line = sys.stdin.buffer.readline()
    if not line:
        return ORPHANED
    order = json.loads(line)
    folder = Path(order["run"]["tracking"]["out"])
    clock, writing = _Clock(order["spent"]), threading.Lock()
    threading.Thread(target=_leave_with_parent, args=(folder, clock, writing), daemon=True).start()
    error = _train(order["run"], order["resume"])
    with writing:
        update_record(folder, status="failed" if error else "finished", error=error, **clock.read())
        if error is None and not order["keep_checkpoints"]:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        sys.stderr.flush()
        os._exit(0 if error is None else 1)  # the thread still waits for the parent


def _train(run: dict[str, Any], resume: bool) -> str | None:
    """The last lines of the error, if there was one."""
    try:
        import torch

        from rlstab.config import load_run
        from rlstab.train import Stopped, train

        torch.set_num_threads(1)
        try:
            train(load_run(run), resume=resume, overwrite=not resume)
        except Stopped as stop:  # its checkpoint stands: the process that started this one sees the signal
            signal.signal(stop.number, signal.SIG_DFL)
            os.kill(os.getpid(), stop.number)
    except RlstabError as error:
        traceback.print_exc()
        return " ".join(f"{type(error).__name__}: {error}".split("\n"))  # of several lines, a table shows the last
    except Exception:
        traceback.print_exc()
        return last_lines(traceback.format_exc())
    return None


def _leave_with_parent(folder: Path, clock: _Clock, writing: threading.Lock) -> None:
    sys.stdin.buffer.read()
    with writing:
        update_record(folder, **clock.read())
        os._exit(ORPHANED)


def last_lines(text: str) -> str:
    """The end of a text, where an error says what it is."""
    return "\n".join(text.strip().splitlines()[-LINES:])


if __name__ == "__main__":
    sys.exit(main())
