"""Scores from worker processes, with a time limit for each completion.

Not `multiprocessing` and what is built on it: its workers run the main script again or are copies of a process with
threads, import torch, inherit every secret of the environment, and their answers are unpickled.
"""

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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlstab
from rlstab.errors import ScorerError
from rlstab.tasks.scorers import Scorer
from rlstab.tasks.scoring_worker import LENGTH, LONGEST_LINE, how_ended
from rlstab.visible import visible

#: Seconds that a worker may take to start; imports on a cold, busy machine are slow.
START = 120.0

#: Seconds between looks at whether anybody still waits.
LOOK = 0.1

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
        score: a finite number; 0 where there is none.
        error: what the scorer raised, or how its process ended.
        timed_out: it was killed at the time limit.
    """

    score: float = 0.0
    error: str | None = None
    timed_out: bool = False


class Workers:
    """Processes that score, started when they are needed and replaced when they had to be killed.

    A score depends on the scorer, the right answer and the completion alone, not on the number of workers or the order.
    A completion on which the scorer hangs or crashes costs itself alone.

    Args:
        scorer: what scores; each process gets a copy.
        count: processes at most.
        time_limit: seconds per completion, by the clock.
    """

    def __init__(self, scorer: Scorer, count: int, time_limit: float) -> None:
        self.scorer, self.count, self.time_limit = scorer, count, time_limit
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.Lock()  # one question at a time: evaluation and training share a task
        weakref.finalize(self, _end, self._workers)

    def start(self) -> None:
        """Start a worker and wait for it, to know whether that is possible.

        Raises:
            ScorerError: it is not; the message says why.
        """
        with self._lock:
            self._worker(0, lambda: False)

    def close(self) -> None:
        """End the processes; a later question starts them again."""
        with self._lock:
            _end(self._workers)

    def score_one(self, answer: Any, completion: str) -> float:
        """The score of a completion.

        Raises:
            ScorerError: the scorer raised, its process ended, or the time was up.
        """
        (outcome,) = self.score([(answer, completion)])
        if outcome.timed_out:
            raise ScorerError(
                f"The scorer took longer than {self.time_limit:g} s. Raise `time_limit` if the completion deserves it."
            )
        if outcome.error is not None:
            raise ScorerError(visible(outcome.error, spaces=False))
        return outcome.score

    def score(self, jobs: Sequence[tuple[Any, str]], stop: threading.Event | None = None) -> list[Outcome]:
        """The outcomes of pairs of right answer and completion, in their order.

        Args:
            jobs: the pairs.
            stop: once set, nobody waits for the rest any more, which is left out.

        Raises:
            ScorerError: a worker cannot start.
        """
        outcomes: dict[int, Outcome] = {}
        places, given_up = iter(range(len(jobs))), threading.Event()

        def cancelled() -> bool:
            return given_up.is_set() or (stop is not None and stop.is_set())

        def serve(slot: int) -> None:
            for place in places:  # shared: each place goes to one worker
                if cancelled():
                    return
                answer = self._worker(slot, cancelled).ask(jobs[place], self.time_limit, cancelled)
                if answer is None:
                    return
                outcomes[place] = Outcome(answer.get("score", 0.0), answer.get("error"), "late" in answer)

        count = min(self.count, len(jobs))
        with self._lock, ThreadPoolExecutor(max(1, count)) as pool:
            try:
                for done in [pool.submit(serve, slot) for slot in range(count)]:
                    done.result()
            except BaseException:
                given_up.set()
                raise
        return [outcomes[place] for place in range(next((n for n in range(len(jobs)) if n not in outcomes), len(jobs)))]

    def _worker(self, slot: int, cancelled: Callable[[], bool]) -> _Worker:
        worker = self._workers.get(slot)
        if worker is None or not worker.alive():
            if worker is not None:
                worker.end()
            worker = self._workers[slot] = _Worker()
            answer = worker.ask((os.getpid(), self.scorer, self.time_limit), START, cancelled) or {}
            if "ready" not in answer and not cancelled():
                worker.end()
                why = answer.get("failed") or answer.get("error") or f"It was not ready after {START:g} s."
                said = answer.get("refused") or f"No process can be started that scores. {why}"
                raise ScorerError(visible(said, spaces=False))
        return worker


#: What a worker may answer.
_ANSWERS = {"score": float, "error": str, "ready": bool, "failed": str, "refused": str}


class _Worker:
    """A process that scores one completion at a time."""

    def __init__(self) -> None:
        self._process = _STARTER.submit(_popen).result()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._into, self._out = self._process.stdin, self._process.stdout.fileno()
        self._events = select.poll()
        self._events.register(self._out, select.POLLIN)

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def ask(self, job: Any, time_limit: float, cancelled: Callable[[], bool]) -> dict[str, Any] | None:
        """Its answer, or how it ended; it is killed when its time is up, and when nobody waits any more: then None."""
        deadline, line = time.monotonic() + time_limit, b""
        content = pickle.dumps(job)
        with suppress(OSError, ValueError):  # if it died, the other pipe ends
            self._into.write(LENGTH.pack(len(content)) + content)
            self._into.flush()
        while not line.endswith(b"\n") and len(line) <= LONGEST_LINE:
            left = deadline - time.monotonic()
            if left <= 0 or cancelled():
                self.end()
                return {"late": True} if left <= 0 else None
            if self._events.poll(1000 * min(left, LOOK)):
                piece = os.read(self._out, LONGEST_LINE)
                if not piece:
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(1.0)  # what closed its pipe is about to end
                    self.end()
                    return how_ended(self._process.returncode)
                line += piece
        with suppress(ValueError, RecursionError):
            answer = json.loads(line)
            if isinstance(answer, dict) and [_ANSWERS.get(key) for key in answer] == [*map(type, answer.values())]:
                return answer
        self.end()
        return {"error": "the process gave no answer that can be read"}

    def end(self) -> None:
        """Kill the process, if it runs, and close the pipes."""
        self._process.kill()
        with suppress(OSError), self._process:  # waits, and closes the pipes
            pass


def _popen() -> subprocess.Popen[bytes]:
    own = str(Path(rlstab.__file__).parents[1])
    path = os.pathsep.join([*(folder or str(Path.cwd()) for folder in sys.path), own])
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", "from rlstab.tasks.scoring_worker import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**kept, **_SET, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for the trainer
    )


def _end(workers: dict[int, _Worker]) -> None:
    while workers:
        workers.popitem()[1].end()
