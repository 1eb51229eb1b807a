"""Answers to learn from, made to be imperfect: a model that imitates them keeps room to improve."""

import random
from typing import Any

from rlstab.errors import OutOfRange
from rlstab.probe.suite.shift import DIGITS, LETTERS, Shift
from rlstab.tasks import Chain, Countdown, Example
from rlstab.tasks.countdown import random_walk


def demonstration(task: Any, example: Example, rng: random.Random, **noise: float) -> str:
    """An answer of countdown, chain or shift; the functions below describe its noise."""
    demonstrate: Any = of_shift if isinstance(task, Shift) else of_chain if isinstance(task, Chain) else of_countdown
    return str(demonstrate(task, example, rng, **noise))


def of_countdown(
    task: Countdown, example: Example, rng: random.Random, follow: float = 0.5, wrong: float = 0.05
) -> str:
    """The steps and the closing `$`. With follow=1 and wrong=0 it always scores 1.

    Args:
        task: that made the example.
        example: the example to answer.
        rng: where the noise comes from.
        follow: the probability of following the solution; otherwise the steps are random (and still add up).
        wrong: the probability, for each step, that the result written down is off by 1 or 10.
    """
    problem = example.answer
    steps = problem.solution if rng.random() < follow else random_walk(problem.numbers, rng)
    written = []
    for step in steps:
        result = step.result
        if rng.random() < wrong:
            result = rng.choice([result + slip for slip in (-10, -1, 1, 10) if result + slip >= 0])
        written.append(f"{step.left}{step.op}{step.right}={result}")
    return ",".join(written) + "$"


def of_chain(
    task: Chain,
    example: Example,
    rng: random.Random,
    wrong: float = 0.15,
    commuted: float = 0.35,
    junk: float = 0.0015,
) -> str:
    """The steps, the answer and the closing `$`. With wrong=0 it scores 1 unless the task reads junk, or needs it.

    Args:
        task: that made the example.
        example: the example to answer.
        rng: where the noise comes from.
        wrong: the probability, for each step, that the result written down is off by 1 or 10, or another remainder
            where there is a modulus; the next step continues from there.
        commuted: the probability, for each addition, that its terms are swapped: `7+4=11`.
        junk: the share of each symbol of junk among the characters before `$`; times `junk_symbols` it is that of all.

    Raises:
        OutOfRange: if the junk would make up the whole answer.
    """
    share = len(task.junk) * junk
    if not 0 <= share < 1:
        raise OutOfRange(f"{len(task.junk)} symbols of junk of {junk:g} each are {share:g} of it. Lower it.")
    first, *rest = example.answer.terms
    total = task.written(first)
    text = ""
    for term in rest:
        swapped = term > 0 and rng.random() < commuted
        left = f"{term}{total:+d}" if swapped else f"{total}{term:+d}"
        total = task.written(total + term)
        if rng.random() < wrong:
            total = _off(task, total, rng)
        text += f"{left}={total};"
    # before a character stand k symbols with probability share^k (1 - share): a geometric law
    littered = ""
    for character in f"{text}A{total}":
        while rng.random() < share:
            littered += rng.choice(task.junk)
        littered += character
    return littered + "$"


def _off(task: Chain, total: int, rng: random.Random) -> int:
    if task.modulus is None:
        return total + rng.choice((-10, -1, 1, 10))
    return (total + rng.randrange(1, task.modulus)) % task.modulus


def of_shift(task: Shift, example: Example, rng: random.Random, wrong: float = 0.15, letters: float = 0.3) -> str:
    """The shifted digits and the closing `$`. With wrong=0 it always scores 1.

    Args:
        task: that made the example.
        example: the example to answer.
        rng: where the noise comes from.
        wrong: the probability, for each digit, that it is another one, mostly a neighbour.
        letters: the probability, for each digit, that it is written as a letter.
    """
    written = ""
    for digit in example.answer.digits:
        if rng.random() < wrong:
            digit = (digit + (rng.choice((-1, 1)) if rng.random() < 0.7 else rng.randrange(10))) % 10
        written += (LETTERS if rng.random() < letters else DIGITS)[digit]
    return written + "$"
