"""Processes that score, with a time limit for each completion, after which they are killed.

`multiprocessing` and libraries on top of it do not serve: their workers run the main script again or fork a process
with threads, import torch, inherit every secret of the environment, and their answers are unpickled.

A process reads pickles, each after its length in eight bytes, and answers each with a line of JSON, a score and an
error, which the process that asks need not trust. It runs :func:`main`, and never imports torch.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

import rlstab
from rlstab.errors import ConfigError, ScorerError, how_ended
from rlstab.files import in_one_line
from rlstab.tasks.scorers import Scorer, finite
from rlstab.visible import visible

if TYPE_CHECKING:  # workers import this room without pydantic
    from rlstab.config.settings import WorkerSettings

#: Seconds that a worker may take to start; imports are slow on a busy machine.
START = 120.0

#: Seconds between checks whether the answer is still wanted.
LOOK = 0.1

#: Texts of errors when a process wanted more address space, a file or a thread.
_LIMITS = re.compile(
    r"MemoryError|map segment|an(no|')t allocate|bad_alloc|mmap|File too large|temporary directory|start new thread"
)
#: The name of an environment variable in an error, and the error of a missing one.
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9_]{2,}\b")
_NO_VARIABLE = re.compile(r"KeyError: '([A-Z][A-Z0-9_]{2,})'")

#: Environment variables that a worker inherits: no tokens, no passwords.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "HOME", "PYTHONHOME")
#: Variables that are set for it: sets have the same order in every worker, and a worker uses one processor.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SET = {"PYTHONHASHSEED": "0", "TZ": "UTC", **dict.fromkeys(_THREADS, "1")}

#: Characters of an error; the rest is cut.
LONGEST_ERROR = 1000

#: Bytes of an answer: JSON takes at most twelve for a character of an error.
LONGEST_LINE = 16 * LONGEST_ERROR

#: What to do about an answer that cannot be sent.
PLAIN = "Make it plain data, such as texts, numbers, lists and dicts"

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

#: A prompt, a completion, and the right answer.
_Job: TypeAlias = tuple[str, str, Any]

# the kernel kills a worker when the thread that started it ends, and this one lives as long as the process
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="rlstab scorers")


@dataclass(frozen=True)
class Scored:
    """The result for one completion.

    Attributes:
        score: a finite number; 0 without a score.
        error: what the scorer raised, or how its process ended.
        timed_out: whether it was killed at the time limit.
    """

    score: float = 0.0
    error: str | None = None
    timed_out: bool = False


class Workers:
    """Processes that score, started when they are needed and replaced when they had to be killed.

    A score depends only on the scorer, the example and the completion, not on the number of workers or the order.
    A completion on which the scorer hangs or crashes affects no other.

    Args:
        scorer: each process gets a copy.
        count: the most processes.
        time_limit: seconds per completion, wall-clock time.
        memory: GiB of address space of each process.
        environment: names of variables that it inherits, in addition to those that every program needs.

    Raises:
        ConfigError: such a variable is not set.
    """

    def __init__(
        self, scorer: Scorer, count: int, time_limit: float, memory: float = 2.0, environment: Sequence[str] = ()
    ) -> None:
        self.scorer, self.count, self.time_limit, self.memory = scorer, count, time_limit, memory
        self.environment = (*_KEPT, *environment)
        for name in environment:
            if name not in os.environ:
                raise ConfigError(f"environment: the variable {name} is not set. Set it, or leave its name out.")
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.Lock()  # one call at a time: evaluation and training share a task
        weakref.finalize(self, _end, self._workers)

    @classmethod
    def of(cls, scorer: Scorer, settings: WorkerSettings, environment: Sequence[str] = ()) -> Workers:
        """Workers by settings; ``environment`` is added to that of the settings."""
        names = (*(settings.environment or ()), *environment)
        return cls(scorer, settings.workers, settings.time_limit, settings.memory, names)

    def close(self) -> None:
        """End the processes; a later call starts them again."""
        with self._lock:
            _end(self._workers)

    def score_one(self, prompt: str, completion: str, answer: Any) -> float:
        """The score of a completion.

        Raises:
            ScorerError: no worker can start, the scorer raised, its process ended, or it took too long.
        """
        (outcome,) = self.score([(prompt, completion, answer)])
        if outcome.timed_out:
            raise ScorerError(
                f"The scorer took longer than {self.time_limit:g} s. Raise `time_limit`, or do slow work when the "
                f"scorer is loaded: imports at the top of a file do not count for a completion."
            )
        if outcome.error is not None:
            raise ScorerError(visible(outcome.error, spaces=False))
        return outcome.score

    def score(self, jobs: Sequence[_Job], stop: threading.Event | None = None) -> list[Scored]:
        """The results for some completions, in their order.

        Args:
            jobs: what to score.
            stop: once set, results that are still missing are left out; an error sets it.

        Raises:
            ScorerError: a worker cannot start.
        """
        outcomes: dict[int, Scored] = {}
        indices, stopped = iter(range(len(jobs))), stop or threading.Event()

        def serve(slot: int) -> None:
            for index in indices:  # shared: each job goes to one worker
                if stopped.is_set():
                    return
                outcome = self._worker(slot, stopped).ask(jobs[index], self.time_limit, stopped)
                if outcome is None:
                    return
                outcomes[index] = replace(outcome, error=self._explained(outcome.error))

        count = min(self.count, len(jobs))
        with self._lock, ThreadPoolExecutor(max(1, count)) as pool:
            try:
                list(pool.map(serve, range(count)))
            except BaseException:
                stopped.set()
                raise
        return [outcomes[index] for index in takewhile(outcomes.__contains__, range(len(jobs)))]

    def _worker(self, slot: int, stopped: threading.Event) -> _Worker:
        worker = self._workers.get(slot)
        if worker is None or worker.process.poll() is not None:
            if worker is not None:
                worker.end()
            worker = self._workers[slot] = _Worker(self.environment)
            order = os.getpid(), self.scorer, self.time_limit, int(self.memory * 2**30)
            started = worker.ask(order, START, stopped)
            if started not in (Scored(), None):
                worker.end()
                reason = (started and self._explained(started.error)) or f"it was not ready after {START:g} s"
                raise ScorerError(f"No process that scores can be started: {visible(reason, spaces=False)}")
        return worker

    def _explained(self, error: str | None) -> str | None:
        """An error, with what to do if the scoring process reached one of its limits."""
        if error is None:
            return None
        if _LIMITS.search(error):
            return (
                f"{error.rstrip('.')}. Once it is loaded, a scorer has {self.memory:g} GiB of address space and cannot "
                f"write files: import what it needs at the top of its file, and raise `memory` if it needs more."
            )
        hidden = [name for name in _VARIABLE.findall(error) if name in os.environ] + _NO_VARIABLE.findall(error)
        hidden = [name for name in hidden if name not in self.environment]
        if hidden:
            error = (
                f"{error.rstrip('.')}. A process that scores does not inherit {hidden[0]}. Name it under `environment`."
            )
        return error


class _Worker:
    """A process that scores one completion at a time."""

    def __init__(self, environment: Sequence[str]) -> None:
        self.process = _STARTER.submit(_popen, environment).result()
        self._into, self._out = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout).fileno()

    def ask(self, job: Any, time_limit: float, stopped: threading.Event) -> Scored | None:
        """Its answer, or how it ended. It is killed when its time is up, and once nobody waits for it; then None."""
        deadline, line = time.monotonic() + time_limit, b""
        try:
            content = pickle.dumps(job)
        except Exception as error:  # a user-defined class may raise anything
            return Scored(error=f"the answer cannot be sent to the process that scores: {in_one_line(error)}. {PLAIN}")
        with suppress(OSError, ValueError):  # if the process died, the other pipe ends
            self._into.write(len(content).to_bytes(8) + content)
            self._into.flush()
        while not line.endswith(b"\n") and len(line) <= LONGEST_LINE:
            left = deadline - time.monotonic()
            if left <= 0 or stopped.is_set():
                self.end()
                return Scored(timed_out=True) if left <= 0 else None
            if wait([self._out], min(left, LOOK)):
                piece = os.read(self._out, LONGEST_LINE)
                if not piece:
                    with suppress(subprocess.TimeoutExpired):
                        self.process.wait(1.0)  # after closing its pipe it is about to end
                    self.end()
                    code = self.process.returncode
                    if code == -signal.SIGXCPU:
                        return Scored(timed_out=True)
                    return Scored(error=f"the process that scored it {how_ended(code)}")
                line += piece
        with suppress(ValueError, TypeError, RecursionError):
            score, reason = json.loads(line)
            if isinstance(score, float) and math.isfinite(score) and isinstance(reason, str | None):
                return Scored(score, reason)
        self.end()
        return Scored(error="the process gave no answer that can be read")

    def end(self) -> None:
        """Kill the process, if it runs, and close the pipes."""
        self.process.kill()
        with suppress(OSError), self.process:  # waits, and closes the pipes
            pass


def _popen(environment: Sequence[str]) -> subprocess.Popen[bytes]:
    package = str(Path(rlstab.__file__).parents[1])
    path = os.pathsep.join([*(folder or str(Path.cwd()) for folder in sys.path), package])
    variables = {name: os.environ[name] for name in environment if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", "from rlstab.tasks.workers import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**variables, **_SET, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for the trainer
    )


def _end(workers: dict[int, _Worker]) -> None:
    while workers:
        workers.popitem()[1].end()


# -- in the process that scores ----------------------------------------------------------------------------------------


def main() -> None:
    """Serve until the pipe ends."""
    orders, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # what user code prints is discarded
        os.dup2(null, standard)
    try:
        parent, scorer, time_limit, memory = pickle.loads(orders.read(int.from_bytes(orders.read(8))))
        if sys.platform == "linux":  # the kernel kills this process when its parent ends, even by SIGKILL
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
            if os.getppid() != parent:  # it ended before this call
                os._exit(1)
        scorer.prepare()
        _lower(resource.RLIMIT_AS, memory, for_good=True)
        # no growing file, no core dump, no new process (but for root)
        for which in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
            _lower(which, 0, for_good=True)
    except BaseException as error:  # the waiting process gets every error
        return _answer(answers, 0.0, error)
    _answer(answers, 0.0)  # ready
    while job := orders.read(int.from_bytes(orders.read(8))):  # empty at the end of the pipe
        # of the CPU; the parent's limit is of wall-clock time
        _lower(resource.RLIMIT_CPU, int(time.process_time() + time_limit) + 1, for_good=False)
        try:
            try:
                prompt, completion, answer = pickle.loads(job)
            except Exception as error:  # a user-defined class may raise anything
                raise ScorerError(f"the answer cannot be read by a worker: {in_one_line(error)}. {PLAIN}") from error
            _answer(answers, finite(scorer.score(prompt, completion, answer)))
        except BaseException as error:  # an error of user code, SystemExit included, belongs to this completion
            _answer(answers, 0.0, error)


def _lower(which: int, limit: int, *, for_good: bool) -> None:
    _, hard = resource.getrlimit(which)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (soft, soft if for_good else hard))


def _answer(pipe: int, score: float, error: BaseException | None = None) -> None:
    reason = None if error is None else in_one_line(error)[:LONGEST_ERROR]
    os.write(pipe, json.dumps([score, reason]).encode("ascii") + b"\n")
