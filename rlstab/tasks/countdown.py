"""Countdown: reach a target from a few numbers, writing out every step."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlstab.tasks.generated import Generated
from rlstab.tasks.task import Example

#: One token per character. `$` ends an answer; the last nine occur in no prompt and no demonstration of countdown. They
#: serve `chain` and user-defined tasks on the same tokenizer.
ALPHABET = "0123456789+-*=,>: $" + "/();?#~AQ"

LARGEST_RESULT = 99

# ASCII digits without sign, blank, underscore or leading zero; at most 18, which int() accepts at any setting
_NUMBER = "(0|[1-9][0-9]{0,17})"
_STEP = re.compile(rf"{_NUMBER}([-+*]){_NUMBER}={_NUMBER}")


@dataclass(frozen=True)
class Equation:
    """`left op right = result`, as in `3*7=21`."""

    left: int
    op: str
    right: int
    result: int


@dataclass(frozen=True)
class Problem:
    """The numbers, the target, and the steps (one way of several) from which the target was made."""

    numbers: tuple[int, ...]
    target: int
    solution: tuple[Equation, ...]


@dataclass(eq=False)
class Countdown(Generated):
    """Prompts like `3 7 8>29:`, answers like `3*7=21,21+8=29$`.

    An answer scores 1 if every step is right, every number and every intermediate result is used exactly once, the
    last result is the target, and `$` ends it; else 0. Text after the first `$` does not count. Numbers are written
    plainly: no sign, no leading zero, no blanks; so no step may go below zero.

    Two problems that differ in the order of their numbers are the same one, and in the same split.

    Args:
        numbers: how many numbers a problem has, 2 to 6.
        low: the smallest number, at least 1.
        high: the largest number, at most 99.
        seed: chooses the sequence of problems.

    Raises:
        OutOfRange: for settings outside these ranges, or with too few problems to fill both splits.
    """

    numbers: int = 3
    low: int = 1
    high: int = 9
    seed: int = 0
    name = "countdown"

    def __post_init__(self) -> None:
        self.require(numbers=(2, 6), high=(1, LARGEST_RESULT), low=(1, self.high))
        super().__post_init__()
        for split in self.size:  # settings with too few problems fail here, not in the middle of a run
            self.example(split, 0)

    def draw(self, rng: random.Random) -> tuple[Example, str]:
        """A problem and its text; the `answer` is a `Problem`."""
        numbers = tuple(rng.randint(self.low, self.high) for _ in range(self.numbers))
        solution = random_walk(numbers, rng)
        target = solution[-1].result
        example = Example(f"{' '.join(map(str, numbers))}>{target}:", Problem(numbers, target, solution))
        return example, f"{sorted(numbers)}>{target}"

    def score(self, example: Example, completion: str) -> float:
        """Return 1.0 for a right answer, else 0.0. Never raises, whatever the text."""
        body, end, _ = completion.partition("$")
        problem: Problem = example.answer
        pool = list(problem.numbers)
        for text in body.split(","):
            step = _STEP.fullmatch(text)
            if step is None:
                return 0.0
            left, op, right, result = int(step[1]), step[2], int(step[3]), int(step[4])
            for used in (left, right):
                if used not in pool:
                    return 0.0
                pool.remove(used)
            if _apply(left, op, right) != result:
                return 0.0
            pool.append(result)
        return float(bool(end) and pool == [problem.target])


def random_walk(numbers: Sequence[int], rng: random.Random) -> tuple[Equation, ...]:
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
        steps.append(Equation(left, op, right, _apply(left, op, right)))
        pool.append(steps[-1].result)
    return tuple(steps)


def _apply(left: int, op: str, right: int) -> int:
    return left + right if op == "+" else left - right if op == "-" else left * right
