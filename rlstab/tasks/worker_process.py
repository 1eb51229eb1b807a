"""A process that scores completions for another process, which may kill it at any time.

It reads pickles, each after its length in eight bytes, and answers each with a line of JSON, a score and an error,
which the process that asks need not trust. It never imports torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import signal
import struct
import sys
from typing import BinaryIO

from rlstab.errors import ScorerError
from rlstab.files import in_one_line
from rlstab.tasks.scorers import finite

#: Characters of an error; the rest is cut.
LONGEST_ERROR = 1000

#: Bytes of an answer: JSON takes at most twelve for a character of an error.
LONGEST_LINE = 16 * LONGEST_ERROR

#: The length of the pickle that follows.
LENGTH = struct.Struct("<Q")

#: What to do about an answer that cannot be sent.
PLAIN = "Make it plain data, such as texts, numbers, lists and dicts"

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    """Serve until the pipe ends."""
    orders, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # what user code prints is discarded
        os.dup2(null, standard)
    try:
        parent, scorer, time_limit, memory = pickle.loads(_read(orders))
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
    while job := _read(orders):
        usage = resource.getrusage(resource.RUSAGE_SELF)  # of the CPU; the parent's limit is of wall-clock time
        _lower(resource.RLIMIT_CPU, int(usage.ru_utime + usage.ru_stime + time_limit) + 1, for_good=False)
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


def _read(pipe: BinaryIO) -> bytes:
    """The next pickle; empty at the end of the pipe."""
    length = pipe.read(LENGTH.size)
    return pipe.read(*LENGTH.unpack(length)) if length else b""
