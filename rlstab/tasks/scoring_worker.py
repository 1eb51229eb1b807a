"""A process that scores completions for another one, which may kill it at any time.

It reads pickles, each after its length in eight bytes, and answers in lines of JSON: the process that asks need not
trust what comes back. It never imports torch.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlstab.errors import ScorerError
from rlstab.tasks import sandbox
from rlstab.tasks.scorers import Scorer

#: Characters of an error that are kept.
LONGEST_ERROR = 1000

#: Bytes of an answer; an error of that many characters has at most twelve for each.
LONGEST_LINE = 16 * LONGEST_ERROR

#: The first answer of a worker.
READY = {"ready": True}

#: Of a pickle that follows.
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Order:
    """What a worker is for.

    Attributes:
        parent: process id of the one that asks.
        scorer: what scores.
        time_limit: seconds that a completion may take.
        sandboxed: whether completions are executed, each in a process of its own in a sandbox.
    """

    parent: int
    scorer: Scorer
    time_limit: float
    sandboxed: bool


def main() -> None:
    """Serve until the pipe ends."""
    orders, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # nobody reads what foreign code prints
        os.dup2(null, standard)
    order: Order = _read(orders)
    try:
        sandbox.die_with(order.parent)
        if order.sandboxed:
            _enter_sandbox(order)
        try:
            order.scorer.prepare()
        except ScorerError as error:  # it says all there is to say
            _answer(answers, {"refused": _words(error)})
            return
        if not order.sandboxed:
            sandbox.limit()
    except BaseException as error:  # whatever it is, the one who waits is told
        _answer(answers, {"failed": _words(error)})
        return
    _answer(answers, READY)
    while (job := _read(orders)) is not None:
        if order.sandboxed:
            os.write(answers, _apart(order, job, orders.fileno(), answers))
        else:
            sandbox.limit_cpu(order.time_limit)
            _answer(answers, _score(order.scorer, *job))


def _enter_sandbox(order: Order) -> None:
    home = Path.home()
    folders = [one for one in (sys.prefix, sys.base_prefix, *sys.path) if not home.is_relative_to(one)]
    try:
        sandbox.enter(folders)
        answer = json.loads(_apart(order, None))
        if answer != READY:
            raise OSError(answer.get("error"))
    except OSError as error:
        raise ScorerError(
            f"Completions are to be executed, which needs a sandbox, and there is none on this machine ({error}). "
            "SECURITY.md says what it needs."
        ) from error


def _apart(order: Order, job: tuple[Any, str] | None, *hidden: int) -> bytes:
    """The answer of a process of its own: what a completion does there, no other completion meets.

    Args:
        order: what the worker is for.
        job: right answer and completion; None asks only whether such a process can be made.
        hidden: pipes that the process must not have.
    """
    out, into = os.pipe()
    child = os.fork()
    if not child:
        try:
            for pipe in (*hidden, out):
                os.close(pipe)
            sandbox.shut()
            sandbox.limit()
            sandbox.limit_cpu(order.time_limit)
            _answer(into, _score(order.scorer, *job) if job else READY)
        except BaseException as error:
            _answer(into, {"error": _words(error)})
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as answers:
        answered, _, _ = select.select([answers], [], [], order.time_limit)
        line = answers.readline(LONGEST_LINE) if answered else _line({"late": True})
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return line if line.endswith(b"\n") else _line(how_ended(code))


def how_ended(code: int) -> dict[str, Any]:
    """The answer of a process that ended before it gave one, from its exit code."""
    if code == -signal.SIGXCPU:
        return {"late": True}
    how = f"ended with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    return {"error": f"the process that scored it {how}"}


def _score(scorer: Scorer, answer: Any, completion: str) -> dict[str, Any]:
    try:
        return {"score": float(scorer.score(answer, completion))}
    except BaseException as error:  # SystemExit as well: whatever foreign code raises belongs to this completion
        return {"error": _words(error)}


def _words(error: BaseException) -> str:
    own = isinstance(error, ScorerError)
    return (str(error) if own else f"{type(error).__name__}: {error}")[:LONGEST_ERROR]


def _line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode("ascii") + b"\n"


def _answer(pipe: int, answer: dict[str, Any]) -> None:
    os.write(pipe, _line(answer))


def _read(pipe: BinaryIO) -> Any:
    length = pipe.read(LENGTH.size)
    return pickle.loads(pipe.read(*LENGTH.unpack(length))) if length else None
