"""Scorers for tests of the processes around them. They must not import torch."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from rlstab.tasks.scorers import AnswerPattern, GymScorer


class Acts:
    """Does what a completion says: the first word of a completion is what happens, the rest is given to it."""

    def prepare(self) -> None:
        pass

    def score(self, answer: Any, completion: str) -> float:
        what, _, rest = completion.partition(" ")
        return float(getattr(self, what)(rest))

    def say(self, rest: str) -> float:
        return float(rest)

    def length(self, rest: str) -> int:
        return len(rest)

    def python(self, rest: str) -> float:
        return eval(rest)

    def loop(self, rest: str) -> float:
        while True:
            pass

    def power(self, rest: str) -> float:
        return 9**9**9  # one operation of the interpreter, which no handler of a signal interrupts

    def sleep(self, rest: str) -> float:
        time.sleep(1000)
        return 1.0

    def memory(self, rest: str) -> int:
        return len(bytearray(64 * 2**30))

    def crash(self, rest: str) -> float:
        os.kill(os.getpid(), signal.SIGSEGV)
        return 1.0

    def leave(self, rest: str) -> float:
        os._exit(7)

    def exit(self, rest: str) -> float:
        sys.exit("bye")

    def complain(self, rest: str) -> float:
        raise ValueError(rest)

    def recurse(self, rest: str) -> float:
        return self.recurse(rest)

    def torch(self, rest: str) -> float:
        return float("torch" in sys.modules)

    def garbage(self, rest: str) -> float:
        """Answer in the place of the worker."""
        for pipe in range(3, 64):
            try:
                os.write(pipe, rest.encode() + b"\n")
            except OSError:
                continue
        time.sleep(1000)
        return 1.0

    def write(self, rest: str) -> float:
        Path(rest).write_text("x")
        return 1.0


class AnyDataSet:
    """The scorers of all data sets of reasoning-gym: an answer is a name, options and an entry."""

    def __init__(self) -> None:
        self.made: dict[str, GymScorer] = {}

    def prepare(self) -> None:
        importlib.import_module("reasoning_gym.factory")

    def score(self, answer: Any, completion: str) -> float:
        name, options, entry = answer
        if name not in self.made:
            self.made[name] = GymScorer(name, options, AnswerPattern(None), None)
        return self.made[name].score(entry, completion)


class NeverReady(Acts):
    def prepare(self) -> None:
        raise ImportError("no such\x1b[31m library")


class Picky:
    """Half a point for each completion, but one in three hangs, which its text decides."""

    def prepare(self) -> None:
        pass

    def score(self, answer: Any, completion: str) -> float:
        while zlib.crc32(completion.encode()) % 3 == 0:
            time.sleep(1)
        return 0.5
