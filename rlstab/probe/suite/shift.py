"""Shifted digits, the cheap task of the probes: each digit of a number plus a key, modulo 10."""

import random
from dataclasses import dataclass

from rlstab.tasks import Example
from rlstab.tasks.generated import Generated
from rlstab.tasks.task import Split

DIGITS, LETTERS = "0123456789", "abcdefghij"

#: The characters of prompts and answers.
ALPHABET = DIGITS + LETTERS + "=$"

_VALUES = {character: value for characters in (DIGITS, LETTERS) for value, character in enumerate(characters)}


@dataclass(frozen=True)
class Shifted:
    """The digits to write, and what the first character has to be: ``DIGITS``, ``LETTERS`` or either; or no answer."""

    digits: tuple[int, ...]
    first: str = ""
    solvable: bool = True


@dataclass(eq=False)
class Shift(Generated):
    """Prompts like ``352791=``, answers like ``85024$``: the key 3 is added to each of the digits 5, 2, 7, 9, 1.

    A digit may be written as a letter as well, ``a`` for 0 to ``j`` for 9. Both are right, so there is entropy in an
    answer that the reward neither asks for nor forbids. Two settings break the training side on purpose; the held-out
    side is always the task that is meant.

    Args:
        length: digits to shift.
        keys: different keys, from 0.
        solvable: the share of training prompts to which an answer can score.
        switch: the training prompt from which on an answer has to begin with a letter, as all held-out ones then do;
            before it an answer has to begin with a digit. None asks for neither.
        seed: chooses the sequence of problems.

    Raises:
        OutOfRange: for a setting outside its range.
    """

    length: int = 5
    keys: int = 5
    solvable: float = 1.0
    switch: int | None = None
    seed: int = 0
    name = "shift"

    def __post_init__(self) -> None:
        self.require(length=(1, 20), keys=(1, 10), solvable=(0, 1), switch=(0, 10**7))
        super().__post_init__()

    def draw(self, rng: random.Random) -> tuple[Example, str]:
        """A problem and its text; the `answer` is a `Shifted`."""
        key = rng.randrange(self.keys)
        digits = [rng.randrange(10) for _ in range(self.length)]
        prompt = f"{key}{''.join(map(str, digits))}="
        return Example(prompt, Shifted(tuple((digit + key) % 10 for digit in digits))), prompt

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` of a split, with what a training prompt of this number asks for."""
        example, first, solvable = super().example(split, index), "", True
        if self.switch is not None:
            first = LETTERS if split == "eval" or index >= self.switch else DIGITS
        if split == "train" and self.solvable < 1:
            solvable = random.Random(f"solvable {self.seed} {index}").random() < self.solvable
        return Example(example.prompt, Shifted(example.answer.digits, first, solvable))

    def score(self, example: Example, completion: str) -> float:
        """Return 1.0 for a right answer that can score, else 0.0."""
        answer: Shifted = example.answer
        body, end, _ = completion.partition("$")
        right = bool(end) and tuple(_VALUES.get(character, -1) for character in body) == answer.digits
        return float(right and answer.solvable and (not answer.first or body[0] in answer.first))
