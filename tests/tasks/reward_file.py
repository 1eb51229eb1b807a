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
    return prompt == f"{answer}?" and completion in ("", "yes \U0001d7d9")


def acts(prompt, completion, answer):
    """Does what the completion says."""
    match completion:
        case "hang":
            time.sleep(1000)
        case "power":
            return 9**9**9
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("odd [completion]")
        case "leave":
            sys.exit("bye")
        case "none":
            return None
        case "text":
            return "1"
        case "nan":
            return float("nan")
        case "infinite":
            return -float("inf")
        case "whole":
            return 3
        case "truth":
            return True
        case "negative":
            return -12.5
        case "torch":
            return "torch" in sys.modules
    return 0.25


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
