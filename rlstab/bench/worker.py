"""Makes runs in turn, each in its own process, forked from one that has imported what they need.

The order of a run is in its folder. A line on standard input names the folder, and the answer is a line with the exit
code of its process on standard output. Standard input stays open for as long as the parent lives: its end ends the
worker and its run, however the parent died.

``python -m rlstab.bench.worker FOLDER`` makes one run without a parent, for schedulers. After SIGTERM it stops
after a checkpoint, and the same command continues the run.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from rlstab.bench.record import FILE, end_of, last_lines, update_record
from rlstab.errors import RlstabError, how_ended
from rlstab.run_files import CHECKPOINTS, OUT

#: File in the folder of a run for its output.
LOG = "worker.log"

#: File in the folder of a run with its order.
ORDER = "order.json"
#: The state of a run that was handed to a scheduler and has not begun.
QUEUED = "queued"

#: Seconds that a command has to end by itself after SIGTERM; the parent of a worker waits longer.
GRACE = 6.0

#: Exit code of a run whose parent is gone.
ORPHANED = 3


def main() -> None:
    """Make ordered runs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answers = os.dup(1)
    os.dup2(2, 1)  # printed output must not be taken for an answer
    while line := sys.stdin.buffer.readline():
        folder = Path(json.loads(line))
        order = json.loads((folder / ORDER).read_text(encoding="utf-8"))
        if "run" in order:
            import rlstab.train.loop  # noqa: F401  # once for all runs
        # macOS's frameworks do not survive a fork: there a worker makes one run and ends
        if sys.platform != "linux" or not (process := os.fork()):
            _make(folder, order)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with suppress(OSError):  # the parent is gone
            os.write(answers, f"{code}\n".encode())


def make_alone(folder: Path) -> NoReturn:
    """Make or continue the run that is ordered in a folder; a finished one stays."""
    order, record = (json.loads((folder / name).read_text(encoding="utf-8")) for name in (ORDER, FILE))
    if record.get("status") == "finished":
        sys.exit(0)
    if record.get("status") != QUEUED:  # it was stopped, or failed
        resume = can_go_on(folder, "command" in order)
        spent = {name: record.get(name) if resume else 0.0 for name in ("seconds", "cpu_seconds")}
        order |= {"resume": resume, "spent": spent}
    os.chdir(order["cwd"])
    os.environ.update(order["env"])
    update_record(folder, status="running", error=None)
    _make(folder, order, alone=True)


def can_go_on(folder: Path, by_command: bool) -> bool:
    """Whether a run left a whole checkpoint; or a command any file, since it looks for its state itself."""
    if by_command:
        return any((folder / OUT).glob("*"))
    if not (folder / CHECKPOINTS).is_dir():
        return False
    from rlstab.train import checkpoint  # loads transformers

    return any(checkpoint.read(path) is not None for path in checkpoint.checkpoints(folder / CHECKPOINTS))


def _make(folder: Path, order: dict[str, Any], *, alone: bool = False) -> NoReturn:
    """Train, record how it ended, and end the process.

    Args:
        folder: the folder of the run.
        order: ``run`` (a resolved run) or ``command``; ``resume``, ``keep_checkpoints`` and ``spent``, the seconds of
            earlier attempts.
        alone: whether standard input does not tell when the parent is gone.
    """
    start, before, writing = time.perf_counter(), order["spent"], threading.Lock()
    command = _Command(order["command"]) if "command" in order else None

    def note(**values: Any) -> None:
        """Record values, and the time of the run with earlier attempts: of the wall and of the CPU; None if unknown."""
        children = os.times()  # commands that have ended
        cpu = time.process_time() + ("command" in order) * (children.children_user + children.children_system)
        spent = {"seconds": time.perf_counter() - start, "cpu_seconds": cpu}
        sums = {name: None if before[name] is None else round(before[name] + new, 3) for name, new in spent.items()}
        update_record(folder, **values, **sums)

    def leave_with_parent() -> None:
        os.read(0, 1)  # nothing is sent before the run has ended
        with writing:
            if command:
                command.end()
            note()
            os._exit(ORPHANED)

    with (folder / LOG).open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    if not alone:
        threading.Thread(target=leave_with_parent, daemon=True).start()
    error = command.run(folder / LOG) if command else _train(order["run"], order["resume"])
    if command and command.stopped:
        note()
        signal.signal(command.stopped, signal.SIG_DFL)
        os.kill(os.getpid(), command.stopped)
    with writing:
        note(status="failed" if error else "finished", error=error)
        if error is None and not order["keep_checkpoints"] and command is None:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if error is None else 1)  # the thread still waits for the parent


class _Command:
    """The command of another trainer, with all processes that it starts.

    Attributes:
        stopped: number of the signal that asked this process to end; 0 without one.
    """

    def __init__(self, arguments: list[str]) -> None:
        self._arguments, self.stopped = arguments, 0
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, log: Path) -> str | None:
        """Wait for its end; return the last lines of its log unless its code is 0."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self._stop)
        try:  # a separate process group, so that processes that it leaves behind can be ended
            self._process = subprocess.Popen(self._arguments, stdin=subprocess.DEVNULL, process_group=0)
        except OSError as error:
            return f"{self._arguments[0]} cannot be started: {error.strerror or error}"
        code = self._process.wait()
        if self.stopped:
            self.end()
        if code == 0:
            return None
        return end_of(log, f"the command {how_ended(code)}")

    def end(self) -> None:
        """Ask it to end, and kill what remains after a while; another thread waits for it."""
        deadline = time.monotonic() + GRACE
        self._signal(signal.SIGTERM)
        while self._signal(0) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> bool:
        """Send a signal to all processes that it started; return whether any exists."""
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, number)
        except OSError:
            return False
        return True

    def _stop(self, number: int, frame: object) -> None:
        self.stopped = number
        threading.Thread(target=self.end, daemon=True).start()


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
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, RlstabError):  # of several lines, a table shows the last
            return " ".join(f"{type(error).__name__}: {error}".split("\n"))
        return last_lines(traceback.format_exc())
    return None


if __name__ == "__main__":
    make_alone(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
