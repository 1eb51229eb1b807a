"""Scorers for tests of the processes around them. They must not import torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def hang() -> None:
    while True:
        pass


def recurse() -> None:
    recurse()


def write_to_pipes(text: str) -> None:
    """Answer in the place of the worker."""
    for pipe in range(3, 64):
        try:
            os.write(pipe, text.encode() + b"\n")
        except OSError:
            continue
    time.sleep(1000)


def complain(text: str) -> None:
    raise ValueError(text)


#: What a completion may ask for; the rest of it is given to it.
ACTS: dict[str, Callable[[str], Any]] = {
    "say": float,
    "length": len,
    "python": eval,
    "loop": lambda rest: hang(),
    "power": lambda rest: 9**9**9,  # one operation of the interpreter, which no handler of a signal interrupts
    "sleep": lambda rest: time.sleep(1000),
    "memory": lambda rest: bytearray(64 * 2**30),
    "crash": lambda rest: os.kill(os.getpid(), signal.SIGSEGV),
    "leave": lambda rest: os._exit(7),
    "exit": lambda rest: sys.exit("bye"),
    "complain": complain,
    "recurse": lambda rest: recurse(),
    "torch": lambda rest: "torch" in sys.modules,
    "garbage": write_to_pipes,
    "write": lambda rest: Path(rest).write_text("x"),
}


class Acts:
    """Does what the first word of a completion says."""

    def prepare(self) -> None:
        pass

    def score(self, prompt: str, completion: str, answer: Any) -> float:
        what, _, rest = completion.partition(" ")
        return float(ACTS[what](rest))


class NeverReady(Acts):
    def prepare(self) -> None:
        raise ImportError("no such\x1b[31m library")
