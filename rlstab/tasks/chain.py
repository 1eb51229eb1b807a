"""Chain: add and subtract a few digits from left to right, writing out every step."""

import random
import re
import zlib
from dataclasses import dataclass

from rlstab.errors import OutOfRange
from rlstab.tasks.block import Block
from rlstab.tasks.task import Example, Split

#: Characters that mean nothing: the scorer skips them, and demonstrations hold a few.
JUNK = "()?#~"

EVAL_SHARE = 8

# One line, ASCII digits without leading zero; at most 18, which int() takes at any setting.
_ANSWER = re.compile("[^A]*A(0|-?[1-9][0-9]{0,17})")
_STEP = re.compile("(-?[0-9]{1,18})([+-][0-9]{1,18})=(-?[0-9]{1,18});")
_WITHOUT_JUNK = str.maketrans("", "", JUNK)


@dataclass(frozen=True)
class Sum:
    """Digits with their signs, the first without: `4+7-2` is (4, 7, -2)."""

    terms: tuple[int, ...]

    def __str__(self) -> str:
        first, *rest = self.terms
        return str(first) + "".join(f"{term:+d}" for term in rest)


class Chain:
    """Prompts like `Q4+7-2+5=`, answers like `4+7=11;11-2=9;9+5=14;A14$`.

    An answer scores 1 if its only `A` is followed by the value of the sum and then `$`; else 0. The steps before `A`
    do not count, nor does text after the first `$`, nor do the characters of `JUNK` anywhere. They are what makes
    spurious tokens measurable: a correct answer with junk in it rewards the junk.

    One problem in eight belongs to the eval split, chosen by its terms whatever the seed: training never shows an eval
    problem.

    Args:
        terms: how many digits a problem adds and subtracts, 2 to 6; each is 1 to 9.
        seed: chooses the sequence of problems.

    Raises:
        OutOfRange: for a number of terms outside that range.
    """

    name = "chain"
    keeps_special_tokens = True  # the answer ends with `$`, which is the EOS token of the shipped model
    workers = None

    def __init__(self, terms: int = 4, seed: int = 0) -> None:
        if not 2 <= terms <= 6:
            raise OutOfRange(f"Chain takes 2 to 6 terms, not {terms}. Set `terms` within that range.")
        self.terms, self.seed = terms, seed
        self.size: dict[Split, int | None] = {"train": None, "eval": None}

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` of a split; its `answer` is a `Sum`."""
        # a string seed is hashed with SHA-512: the same on every machine, and unrelated for neighbouring indices
        rng = random.Random(f"chain {self.seed} {split} {index}")
        while True:  # one draw in eight is an eval problem, for every number of terms
            first, *rest = (rng.randint(1, 9) for _ in range(self.terms))
            problem = Sum((first, *(rng.choice((-1, 1)) * digit for digit in rest)))
            if _split_of(problem) == split:
                return Example(f"Q{problem}=", problem)

    def score(self, example: Example, completion: str) -> float:
        """Return 1.0 for a right answer, else 0.0. Never raises, whatever the text."""
        body, end, _ = completion.partition("$")
        problem: Sum = example.answer
        match = _ANSWER.fullmatch(body.translate(_WITHOUT_JUNK))
        return float(bool(end) and match is not None and int(match[1]) == sum(problem.terms))

    def blocks(self, example: Example, completion: str) -> list[Block]:
        """Each step up to its `;`, then the answer up to its `$`. Text after the first `$` is in no block.

        A block earns 1 if it is right given what stands before it, else 0: a step that takes the next term, adds it to
        the result written before or subtracts it, and writes down what comes of it; an answer that is the result
        written last, with the terms that are left. So what follows a mistake can still be right. The outcome is 1 while
        everything is right and 0 from the first mistake on; an answer of outcome 1 scores 1. Never raises, whatever
        the text.
        """
        problem: Sum = example.answer
        total, *rest = problem.terms
        body, end, _ = completion.partition("$")
        *steps, answer = body.split(";")
        found: list[Block] = []
        start = outcome = 0
        for place, step in enumerate(steps):
            right, written = _followed(f"{step};".translate(_WITHOUT_JUNK), total, rest[place : place + 1])
            total = written
            outcome = int(right and (outcome == 1 or place == 0))
            found.append(Block(start, start + len(step) + 1, float(right), outcome))
            start += len(step) + 1
        match = _ANSWER.fullmatch(answer.translate(_WITHOUT_JUNK))
        right = bool(end) and match is not None and int(match[1]) == total + sum(rest[len(steps) :])
        if start < len(body + end):
            found.append(Block(start, len(body + end), float(right), int(right and (outcome == 1 or not steps))))
        return found

    def demonstration(
        self, example: Example, rng: random.Random, wrong: float = 0.15, commuted: float = 0.35, junk: float = 0.0015
    ) -> str:
        """Return an answer to learn from, made to be imperfect: a model that imitates it keeps room to improve.

        Args:
            example: the example to answer.
            rng: where the noise comes from.
            wrong: the probability, for each step, that the result written down is off by 1 or 10; the next step goes on
                from there.
            commuted: the probability, for each addition, that its terms are swapped: `7+4=11`.
            junk: the share of each character of `JUNK` among the characters before `$`.

        Returns:
            The steps, the answer and the closing `$`. With wrong=0 it always scores 1.
        """
        problem: Sum = example.answer
        total, *rest = problem.terms
        text = ""
        for term in rest:
            swapped = term > 0 and rng.random() < commuted
            left = f"{term}{total:+d}" if swapped else f"{total}{term:+d}"
            total += term
            if rng.random() < wrong:
                total += rng.choice((-10, -1, 1, 10))
            text += f"{left}={total};"
        return _littered(f"{text}A{total}", rng, junk) + "$"


def _followed(step: str, total: int, term: list[int]) -> tuple[bool, int]:
    """Whether a step without junk goes on from the total by the term, if there is one; and the result written in it.

    One that cannot be read leaves the result where it would be after a right one.
    """
    right = total + sum(term)
    match = _STEP.fullmatch(step)
    if match is None:
        return False, right
    left, change, written = (int(one) for one in match.groups())
    orders = [(total, one) for one in term] + [(one, total) for one in term if one > 0]
    return (left, change) in orders and written == right, written


def _littered(text: str, rng: random.Random, share: float) -> str:
    """Put junk before characters of the text, so that each symbol of it makes up a share of the whole."""
    everything = len(JUNK) * share
    # before a character stand k symbols with probability everything^k (1 - everything): a geometric law
    littered = ""
    for character in text:
        while rng.random() < everything:
            littered += rng.choice(JUNK)
        littered += character
    return littered


def _split_of(problem: Sum) -> Split:
    return "eval" if zlib.crc32(str(problem).encode()) % EVAL_SHARE == 0 else "train"
