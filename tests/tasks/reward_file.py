"""Rewards for tests: loaded from this file by worker processes. It must not import torch."""

import os
import signal
import sys
import time

PI = 3.14


def brevity(prompt, completion, answer):
    return 1 / (1 + len(completion))


def seen(prompt, completion, answer):
    """1 where all three arrive as they were sent."""
    return prompt == f"{answer}?" and completion in ("", "\U0001d7d9")


def fail():
    raise ValueError("odd [completion]")


ACTS = {
    "hang": lambda: time.sleep(1000),
    "power": lambda: 9**9**9,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": fail,
    "leave": lambda: sys.exit("bye"),
    "none": lambda: None,
    "text": lambda: "1",
    "nan": lambda: float("nan"),
    "infinite": lambda: -float("inf"),
    "whole": lambda: 3,
    "truth": lambda: True,
    "negative": lambda: -12.5,
    "torch": lambda: "torch" in sys.modules,
}


def acts(prompt, completion, answer):
    """Does what the completion says."""
    return ACTS[completion]() if completion in ACTS else 0.25


class Manner:
    """A function in a class, and one that is an object."""

    @staticmethod
    def polite(prompt, completion, answer):
        return "please" in completion

    def __call__(self, prompt, completion, answer, weight=2.0):
        return weight


manner = Manner()


def two(prompt, completion):
    return 1.0


def four(prompt, completion, answer, level):
    return 1.0


def any_number(*arguments):
    return len(arguments)


def fails_on_nothing(prompt, completion, answer):
    return 1 / len(completion)


def nothing(prompt, completion, answer):
    pass


def slow(prompt, completion, answer):
    time.sleep(1000)
