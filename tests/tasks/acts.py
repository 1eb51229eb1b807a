"""Scorers for tests of the processes around them. They must not import torch."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def recurse(text: str) -> None:
    recurse(text)


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
    "": lambda rest: 0.25,
    "say": float,
    "length": len,
    "python": eval,
    "power": lambda rest: 9**9**9,  # one operation of the interpreter, which no handler of a signal interrupts
    "sleep": lambda rest: time.sleep(1000),
    "memory": lambda rest: bytearray(64 * 2**30),
    "crash": lambda rest: os.kill(os.getpid(), signal.SIGSEGV),
    "leave": lambda rest: os._exit(7),
    "exit": lambda rest: sys.exit("bye"),
    "complain": complain,
    "recurse": recurse,
    "garbage": write_to_pipes,
    "write": lambda rest: Path(rest).write_text("x"),
}


class Acts:
    """Does what the first word of a completion says."""

    def prepare(self) -> None:
        pass

    def score(self, prompt: str, completion: str, answer: Any) -> Any:
        what, _, rest = completion.partition(" ")
        return ACTS[what](rest)

    def __call__(self, prompt: str, completion: str, answer: Any, more: float = 2.0) -> Any:
        return self.score(prompt, completion, answer)


class NeverReady(Acts):
    def prepare(self) -> None:
        raise ImportError("no such\x1b[31m library")


acts = Acts()  # this and what follows are user-defined rewards, which worker processes load from this file


def brevity(prompt: str, completion: str, answer: Any) -> float:
    return 1 / (1 + len(completion))


def seen(prompt: str, completion: str, answer: Any) -> bool:
    """1 where all three arrive as they were sent."""
    return prompt == f"{answer}?" and completion in ("", "\U0001d7d9")


class Manner:
    @staticmethod
    def polite(prompt: str, completion: str, answer: Any) -> bool:
        return "please" in completion


def any_number(*arguments: Any) -> int:
    return len(arguments)
