"""Runs in turn, each in a process of its own, which is forked from one that has imported what they need.

The order of a run is a line of JSON on standard input, the answer a line with the exit code of its process on standard
output. Standard input stays open for as long as the parent lives: its end ends the worker and its run, however the
parent died.
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
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from rlstab.bench.record import update_record
from rlstab.config.run_files import CHECKPOINTS
from rlstab.errors import RlstabError

#: What the run prints goes there, in its folder.
LOG = "worker.log"

#: Lines of an error that are kept.
LINES = 12

#: Exit code of a run whose parent is gone.
ORPHANED = 3


class _Clock:
    """Time that the run took, with the attempts before; None where that is not known."""

    def __init__(self, before: dict[str, float | None]) -> None:
        self._before, self._start = before, time.perf_counter()

    def read(self) -> dict[str, float | None]:
        """``seconds`` of wall time and ``cpu_seconds``, user and system, of all threads of this process."""
        now = {"seconds": time.perf_counter() - self._start, "cpu_seconds": time.process_time()}
        before = self._before
        return {name: None if (old := before[name]) is None else round(old + new, 3) for name, new in now.items()}


def main() -> None:
    """Make what is ordered until nothing more comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answers = os.dup(1)
    os.dup2(2, 1)  # whoever prints is no answer
    import rlstab.train.loop  # noqa: F401  # once for all runs

    while line := sys.stdin.buffer.readline():
        # macOS's frameworks do not survive a fork: there a worker makes one run and ends
        if sys.platform != "linux" or not (process := os.fork()):
            _make(json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with suppress(OSError):  # the parent is gone
            os.write(answers, f"{code}\n".encode())


def _make(order: dict[str, Any]) -> NoReturn:
    """Train, record how it ended, and end the process.

    Args:
        order: ``run`` (a resolved run), ``resume``, ``keep_checkpoints`` and ``spent``, the seconds of the attempts
            before.
    """
    folder = Path(order["run"]["tracking"]["out"])
    clock, writing = _Clock(order["spent"]), threading.Lock()
    with (folder / LOG).open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    threading.Thread(target=_leave_with_parent, args=(folder, clock, writing), daemon=True).start()
    error = _train(order["run"], order["resume"])
    with writing:
        update_record(folder, status="failed" if error else "finished", error=error, **clock.read())
        if error is None and not order["keep_checkpoints"]:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if error is None else 1)  # the thread still waits for the parent


def _train(run: dict[str, Any], resume: bool) -> str | None:
    """The last lines of the error, if there was one."""
    try:
        import torch

        from rlstab.config import load_run
        from rlstab.train.loop import Stopped, train

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
    os.read(0, 1)  # nothing comes before the run has ended
    with writing:
        update_record(folder, **clock.read())
        os._exit(ORPHANED)


def last_lines(text: str) -> str:
    """The end of a text, where an error says what it is."""
    return "\n".join(text.strip().splitlines()[-LINES:])


if __name__ == "__main__":
    main()
