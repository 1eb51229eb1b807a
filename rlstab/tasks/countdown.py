"""Countdown: reach a target from a few numbers, writing out every step."""

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from rlstab.errors import OutOfRange
from rlstab.tasks.task import Example, Split

#: One token per character. `$` ends an answer; the last nine occur in no prompt and no demonstration of countdown. They
#: are there for `chain` and for tasks of your own on the same tokenizer.
ALPHABET = "0123456789+-*=,>: $" + "/();?#~AQ"

LARGEST_RESULT = 99
EVAL_SHARE = 8

# ASCII digits without sign, blank, underscore or leading zero; at most 18, which int() takes at any setting.
_NUMBER = "(0|[1-9][0-9]{0,17})"
_STEP = re.compile(rf"{_NUMBER}([-+*]){_NUMBER}={_NUMBER}")


@dataclass(frozen=True)
class Step:
    """`left op right = result`, as in `3*7=21`."""

    left: int
    op: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left}{self.op}{self.right}={self.result}"


@dataclass(frozen=True)
class Problem:
    """The numbers, the target, and the steps (one way of several) from which the target was made."""

    numbers: tuple[int, ...]
    target: int
    solution: tuple[Step, ...]


class Countdown:
    """Prompts like `3 7 8>29:`, answers like `3*7=21,21+8=29$`.

    An answer scores 1 if every step is right, every number and every intermediate result is used exactly once, the
    last result is the target, and `$` ends it; else 0. Text after the first `$` does not count. Numbers are written
    plainly: no sign, no leading zero, no blanks; so no step may go below zero.

    One problem in eight belongs to the eval split, chosen by its numbers and target whatever the seed: training never
    shows an eval problem, in any order of its numbers.

    Args:
        numbers: how many numbers a problem has, 2 to 6.
        low: the smallest number, at least 1.
        high: the largest number, at most 99.
        seed: chooses the sequence of problems.

    Raises:
        OutOfRange: for settings outside these ranges, or with too few problems to fill both splits.
    """

    name = "countdown"
    keeps_special_tokens = True  # the answer ends with `$`, which is the EOS token of the shipped model
    workers = None

    def __init__(self, numbers: int = 3, low: int = 1, high: int = 9, seed: int = 0) -> None:
        if not 2 <= numbers <= 6:
            raise OutOfRange(f"Countdown takes 2 to 6 numbers, not {numbers}. Set `numbers` within that range.")
        if not 1 <= low <= high <= LARGEST_RESULT:
            raise OutOfRange(
                f"Countdown draws numbers from low={low} to high={high}, which is not a range within "
                f"1 to {LARGEST_RESULT}. Set 1 <= low <= high <= {LARGEST_RESULT}."
            )
        self.numbers, self.low, self.high, self.seed = numbers, low, high, seed
        self.size: dict[Split, int | None] = {"train": None, "eval": None}
        for split in self.size:  # settings with too few problems fail here, not in the middle of a run
            self.example(split, 0)

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` of a split; its `answer` is a `Problem`."""
        # a string seed is hashed with SHA-512: the same on every machine, and unrelated for neighbouring indices
        rng = random.Random(f"countdown {self.seed} {split} {index}")
        for _ in range(10_000):
            numbers = tuple(rng.randint(self.low, self.high) for _ in range(self.numbers))
            solution = random_walk(numbers, rng)
            target = solution[-1].result
            if _split_of(numbers, target) == split:
                prompt = f"{' '.join(map(str, numbers))}>{target}:"
                return Example(prompt, Problem(numbers, target, solution))
        raise OutOfRange(
            f"Countdown with numbers={self.numbers}, low={self.low}, high={self.high} has no problem for the {split} "
            "split: there are too few different problems. Raise `numbers` or widen the range from `low` to `high`."
        )

    def score(self, example: Example, completion: str) -> float:
        """Return 1.0 for a right answer, else 0.0. Never raises, whatever the text."""
        body, end, _ = completion.partition("$")
        problem: Problem = example.answer
        return float(bool(end) and _solves(problem, body))


def random_walk(numbers: Sequence[int], rng: random.Random) -> tuple[Step, ...]:
    """Join random pairs until one number is left; no result is negative or above LARGEST_RESULT."""
    pool, steps = list(numbers), []
    while len(pool) > 1:
        left = pool.pop(rng.randrange(len(pool)))
        right = pool.pop(rng.randrange(len(pool)))
        op = rng.choice("+-*")
        if op == "*" and left * right > LARGEST_RESULT:
            op = "+"
        if op == "+" and left + right > LARGEST_RESULT:
            op = "-"
        if op == "-" and left < right:
            left, right = right, left
        steps.append(Step(left, op, right, _apply(left, op, right)))
        pool.append(steps[-1].result)
    return tuple(steps)


def _apply(left: int, op: str, right: int) -> int:
    return left + right if op == "+" else left - right if op == "-" else left * right


def _split_of(numbers: Sequence[int], target: int) -> Split:
    # sorted: two problems that differ in the order of their numbers are the same problem
    key = f"{sorted(numbers)}>{target}".encode()
    return "eval" if zlib.crc32(key) % EVAL_SHARE == 0 else "train"


def _solves(problem: Problem, body: str) -> bool:
    pool = list(problem.numbers)
    steps = body.split(",")
    if len(steps) != len(pool) - 1:
        return False
    for text in steps:
        match = _STEP.fullmatch(text)
        if match is None:
            return False
        left, op, right, result = int(match[1]), match[2], int(match[3]), int(match[4])
        for used in (left, right):
            if used not in pool:
                return False
            pool.remove(used)
        if _apply(left, op, right) != result:
            return False
        pool.append(result)
    return pool == [problem.target]
