"""Scores from worker processes, with a time limit for each completion."""

from __future__ import annotations

import json
import os
import pickle
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlstab
from rlstab.errors import ScorerError
from rlstab.tasks.scorers import Scorer
from rlstab.tasks.scoring_worker import LENGTH, LONGEST_LINE, Order, how_ended
from rlstab.visible import visible

#: Seconds that a worker may take to start; imports on a cold, busy machine are slow.
START = 120.0

#: Seconds after which a sandbox that should have cut off a completion by itself is killed.
GRACE = 10.0

#: Seconds between looks at whether anybody still waits.
LOOK = 0.1

# without `rlstab` itself, which imports torch
_CODE = (
    "import sys, types; package = sys.modules['rlstab'] = types.ModuleType('rlstab'); package.__path__ = sys.argv[1:];"
    "from rlstab.tasks.scoring_worker import main; main()"
)

#: What a worker inherits of the environment: no tokens, no passwords.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME", "PYTHONHOME")
_SET = {
    "PYTHONHASHSEED": "0",  # sets are gone through in one order, whichever worker scores
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

# the kernel kills a worker when the thread that started it ends: this one lives as long as the process
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="rlstab scorers")


@dataclass(frozen=True)
class Outcome:
    """Of one completion.

    Attributes:
        score: 0 where there is none.
        error: what the scorer raised, or how its process ended.
        timed_out: it was killed at the time limit.
    """

    score: float = 0.0
    error: str | None = None
    timed_out: bool = False


class Workers:
    """Processes that score, started when they are needed and replaced when they had to be killed.

    A score depends on the scorer, the right answer and the completion alone, not on the number of workers or the order.

    Args:
        scorer: what scores; each process gets a copy.
        count: processes at most.
        time_limit: seconds per completion, by the clock.
        sandboxed: completions are executed, each in a process of its own in a sandbox.
    """

    def __init__(self, scorer: Scorer, count: int, time_limit: float, *, sandboxed: bool = False) -> None:
        self.scorer, self.count, self.time_limit, self.sandboxed = scorer, count, time_limit, sandboxed
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()  # one question at a time: evaluation and training share a task
        weakref.finalize(self, _end, self._workers)

    def start(self) -> None:
        """Start a worker and wait for it, to know whether that is possible.

        Raises:
            ScorerError: it is not; the message says why.
        """
        with self._lock:
            self._start()
            while not self._workers[-1].ready:
                self._wait(self._workers[-1:])

    def close(self) -> None:
        """End the processes; a later question starts them again."""
        with self._lock:
            _end(self._workers)

    def score_one(self, answer: Any, completion: str) -> float:
        """The score of a completion.

        Raises:
            ScorerError: the scorer raised, its process ended, or the time was up.
        """
        (found,) = self.score([(answer, completion)])
        if found.timed_out:
            raise ScorerError(
                f"The scorer took longer than {self.time_limit:g} s. Raise `time_limit` if the completion deserves it."
            )
        if found.error is not None:
            raise ScorerError(visible(found.error, spaces=False))
        return found.score

    def score(self, jobs: Sequence[tuple[Any, str]], stop: threading.Event | None = None) -> list[Outcome]:
        """The outcomes of pairs of right answer and completion, in their order.

        Args:
            jobs: the pairs.
            stop: once set, nobody waits for the rest any more, which is left out.

        Raises:
            ScorerError: a worker cannot start.
        """
        found: dict[int, Outcome] = {}
        waiting = deque(range(len(jobs)))
        with self._lock:
            try:
                while len(found) < len(jobs) and not (stop is not None and stop.is_set()):
                    found |= self._wait(self._busy(jobs, waiting), stop)
            finally:
                if len(found) < len(jobs):  # stopped or interrupted: what still runs belongs to nobody
                    _end(self._workers)
        return [found[place] for place in sorted(found)]

    def _busy(self, jobs: Sequence[tuple[Any, str]], waiting: deque[int]) -> list[_Worker]:
        """Hand out what waits, and return those from whom something is expected."""
        for one in [one for one in self._workers if one.place is None and not one.alive()]:
            one.end()
            self._workers.remove(one)
        for one in self._workers:
            if one.ready and one.place is None and waiting:
                place = waiting.popleft()
                one.take(place, jobs[place], self.time_limit + (GRACE if self.sandboxed else 0))
        starting = sum(not one.ready for one in self._workers)
        for _ in range(min(len(waiting) - starting, self.count - len(self._workers))):
            self._start()
        return [one for one in self._workers if one.place is not None or (waiting and not one.ready)]

    def _start(self) -> None:
        self._workers.append(_Worker(Order(os.getpid(), self.scorer, self.time_limit, self.sandboxed)))

    def _wait(self, workers: Sequence[_Worker], stop: threading.Event | None = None) -> dict[int, Outcome]:
        """Wait until something happens; return what has been found, by the place of the completion."""
        events = select.poll()
        for one in workers:
            one.watch(events)
        most = max(0.0, min(one.deadline for one in workers) - time.monotonic())
        events.poll(1000 * (most if stop is None else min(most, LOOK)))
        found = {}
        for one in workers:
            answer = one.look()
            if answer is None:
                continue
            if one.place is None:
                one.ready = "ready" in answer
                if not one.ready:
                    _end(self._workers)
                    why = answer.get("failed") or answer.get("error")
                    said = answer.get("refused") or f"No process can be started that scores. {why}"
                    raise ScorerError(visible(said, spaces=False))
            else:
                found[one.place], one.place = _outcome(answer), None
        return found


class _Worker:
    """A process, and the completion that it scores.

    Attributes:
        ready: it has started.
        place: of the completion among those that were asked for; None where there is none.
        deadline: when it is killed, by the monotonic clock.
    """

    def __init__(self, order: Order) -> None:
        self.ready = False
        self.place: int | None = None
        self.deadline = time.monotonic() + START
        self._process = _STARTER.submit(_popen).result()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._into, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        for pipe in (self._into, self._out):
            os.set_blocking(pipe, False)
        self._unsent, self._line = _message(order), b""

    def take(self, place: int, job: tuple[Any, str], time_limit: float) -> None:
        """Give it a completion."""
        self.place, self._unsent = place, _message(job)
        self.deadline = time.monotonic() + time_limit

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def watch(self, events: select.poll) -> None:
        """Register what it waits for."""
        events.register(self._out, select.POLLIN)
        if self._unsent:
            events.register(self._into, select.POLLOUT)

    def look(self) -> dict[str, Any] | None:
        """What it answered, or how it ended, if it did. It is killed when its time is up."""
        with suppress(BlockingIOError, BrokenPipeError):  # if it died, the other pipe ends
            while self._unsent:
                self._unsent = self._unsent[os.write(self._into, self._unsent) :]
        with suppress(BlockingIOError):
            while piece := os.read(self._out, LONGEST_LINE):
                self._line += piece
                if b"\n" in piece or len(self._line) > LONGEST_LINE:
                    line, self._line = self._line, b""
                    return self._understood(line)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # what closed its pipe is about to end
            self.end()
            return how_ended(self._process.returncode)
        if time.monotonic() < self.deadline:
            return None
        self.end()
        return {"late": True} if self.ready else {"failed": f"It was not ready after {START:g} s."}

    def end(self) -> None:
        """Kill the process, if it runs, and close the pipes."""
        with self._process:
            self._process.kill()

    def _understood(self, line: bytes) -> dict[str, Any]:
        """The answer in a line, from a process that may be in the hands of a completion."""
        kinds = (
            {"score": float, "error": str, "late": bool}
            if self.ready
            else {"ready": bool, "failed": str, "refused": str}
        )
        with suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, dict) and [kinds.get(one) for one in answer] == [*map(type, answer.values())]:
                return answer
        self.end()
        return {"error": "the process gave no answer that can be read"}


def _outcome(answer: dict[str, Any]) -> Outcome:
    return Outcome(answer.get("score", 0.0), answer.get("error"), "late" in answer)


def _message(content: Any) -> memoryview:
    pickled = pickle.dumps(content)
    return memoryview(LENGTH.pack(len(pickled)) + pickled)


def _popen() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(one or str(Path.cwd()) for one in sys.path)
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _CODE, *rlstab.__path__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={**kept, **_SET, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for the trainer
    )


def _end(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().end()
