"""Chain: add and subtract a few digits from left to right, writing out every step."""

import random
import re
import zlib
from dataclasses import dataclass

from rlstab.tasks.generated import Generated
from rlstab.tasks.task import Block, Example

#: Characters without meaning: the scorer skips them, and demonstrations have a few.
JUNK = "()?#~"

# after JUNK, `junk_symbols` continues in a block of Unicode without gaps, in which a character is one code point
MOST_JUNK = 4096
_JUNK = JUNK + "".join(chr(0x4E00 + index) for index in range(MOST_JUNK - len(JUNK)))

# One line, ASCII digits without leading zero; at most 18, which int() takes at any setting.
_ANSWER = re.compile("[^A]*A(0|-?[1-9][0-9]{0,17})")
_STEP = re.compile("(-?[0-9]{1,18})([+-][0-9]{1,18})=(-?[0-9]{1,18});")


@dataclass(frozen=True)
class Expression:
    """Signed digits to add up: `4+7-2` is (4, 7, -2)."""

    terms: tuple[int, ...]

    def __str__(self) -> str:
        return "".join(f"{term:+d}" for term in self.terms).removeprefix("+")


@dataclass(eq=False)
class Chain(Generated):
    """Prompts like `Q4+7-2+5=`, answers like `4+7=11;11-2=9;9+5=14;A14$`.

    An answer scores 1 if its only `A` is followed by the value of the sum and then `$`; else 0. The steps before `A`
    do not count, nor does text after the first `$`, nor does junk: the first `junk_symbols` characters of `JUNK` and
    its continuation. Junk makes spurious tokens measurable: a correct answer with junk in it rewards the junk.

    Three settings define what junk costs. Together they make the littered chain, on which masks of rare tokens are
    compared: there, rare tokens are bad. They serve that purpose and resemble no real task.

    - `fragile`: the reader stumbles over some junk, and an answer that it stumbles in scores 0. Whether it stumbles
      depends on the problem, the symbol and its position in the answer, so no symbol is safe and none is forbidden.
    - `flaky`: training loses this share of the scores, whatever the answer: the reward is 0. The seed of the run and
      the identity of the response decide which ones. Neither evaluation nor :meth:`score` loses any. So right answers
      without junk are punished too, and junk is harder to distinguish from what matters.
    - `needs_junk`: the reverse. An answer without any junk scores 0: there, rare tokens are good.

    Args:
        terms: how many digits a problem adds and subtracts, 2 to 6; the first is 1 to 9.
        seed: chooses the sequence of problems.
        largest: the largest digit after the first, 1 to 9.
        modulus: 2 to 10; results are written as remainders by it, which are single digits. None writes them in full.
        junk_symbols: how many different characters are junk, 1 to 4096.
        fragile: the share of pairs of position and symbol that the reader stumbles over, 0 to 1.
        flaky: the share of scores that training loses, at least 0 and below 1.
        needs_junk: whether an answer needs junk.

    Raises:
        OutOfRange: for a setting outside its range.
    """

    terms: int = 4
    seed: int = 0
    largest: int = 9
    modulus: int | None = None
    junk_symbols: int = len(JUNK)
    fragile: float = 0.0
    flaky: float = 0.0
    needs_junk: bool = False
    name = "chain"

    def __post_init__(self) -> None:
        self.require(terms=(2, 6), largest=(1, 9), modulus=(2, 10), junk_symbols=(1, MOST_JUNK), fragile=(0, 1))
        self.require(flaky=(0, 1 - 2**-53))  # 1 leaves nothing to learn
        super().__post_init__()
        self.junk = _JUNK[: self.junk_symbols]
        self._without_junk = str.maketrans("", "", self.junk)

    def draw(self, rng: random.Random) -> tuple[Example, str]:
        """A problem and its text; the `answer` is a `Expression`."""
        first, *rest = (rng.randint(1, self.largest if index else 9) for index in range(self.terms))
        problem = Expression((first, *(rng.choice((-1, 1)) * digit for digit in rest)))
        return Example(f"Q{problem}=", problem), str(problem)

    def score(self, example: Example, completion: str) -> float:
        """Return 1.0 for a right answer, else 0.0. Never raises, whatever the text."""
        body, end, _ = completion.partition("$")
        problem: Expression = example.answer
        if self._lacks_junk(body) or self._stumbles_in(problem, 0, body):
            return 0.0
        match = _ANSWER.fullmatch(body.translate(self._without_junk))
        return float(bool(end) and match is not None and int(match[1]) == self.written(sum(problem.terms)))

    def _lacks_junk(self, body: str) -> bool:
        return self.needs_junk and not any(symbol in self.junk for symbol in body)

    def _stumbles_in(self, problem: Expression, start: int, text: str) -> bool:
        """Whether the reader stumbles in a part of an answer that begins at an index of it."""
        return self.fragile > 0 and any(
            symbol in self.junk and zlib.crc32(f"{problem} {index} {symbol}".encode()) % 10_000 < self.fragile * 10_000
            for index, symbol in enumerate(text, start)
        )

    def written(self, total: int) -> int:
        """A total in the form in which answers have it: its remainder, if there is a modulus."""
        return total if self.modulus is None else total % self.modulus

    def blocks(self, example: Example, completion: str) -> list[Block]:
        """Each step up to its `;`, then the answer up to its `$`. Text after the first `$` is in no block.

        A block earns 1 if it is right given the text before it, else 0: a step is right if it adds or subtracts the
        next term and writes down the result; an answer is right if it is the last result with the remaining terms. So a
        block after a mistake can still be right. A block in which the reader stumbles is wrong, and so is an answer
        that needs junk if no block has any. The outcome is 1 while everything is right and 0 from the first mistake
        on; an answer of outcome 1 scores 1. Never raises, whatever the text.
        """
        problem: Expression = example.answer
        first, *rest = problem.terms
        total, start, outcome = self.written(first), 0, 1
        body, end, _ = completion.partition("$")
        *steps, answer = body.split(";")
        blocks: list[Block] = []
        for index, step in enumerate(steps):
            right, total = self._followed(f"{step};".translate(self._without_junk), total, rest[index : index + 1])
            right = right and not self._stumbles_in(problem, start, step)
            outcome = int(right and outcome == 1)
            blocks.append(Block(start, start + len(step) + 1, float(right), outcome))
            start = blocks[-1].stop
        match = _ANSWER.fullmatch(answer.translate(self._without_junk))
        right = bool(end) and match is not None and int(match[1]) == self.written(total + sum(rest[len(steps) :]))
        right = right and not self._stumbles_in(problem, start, answer) and not self._lacks_junk(body)
        if start < len(body + end):
            blocks.append(Block(start, len(body + end), float(right), int(right and outcome == 1)))
        return blocks

    def _followed(self, step: str, total: int, term: list[int]) -> tuple[bool, int]:
        """Whether a step without junk continues from the total with the term, if there is one; and the result in it.

        After a step that cannot be read, the result is that of a right step.
        """
        right = self.written(total + sum(term))
        match = _STEP.fullmatch(step)
        if match is None:
            return False, right
        left, change, written = map(int, match.groups())
        orders = {(total, digit) for digit in term} | {(digit, total) for digit in term if digit > 0}
        return (left, change) in orders and written == right, written
