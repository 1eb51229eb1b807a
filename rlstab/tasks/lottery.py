"""Lottery: a sum, and then a draw that nothing can win but by chance. Two turns, of which the second is noise."""

import zlib
from dataclasses import dataclass

from rlstab.tasks.chain import Chain, Expression
from rlstab.tasks.generated import EVAL_SHARE
from rlstab.tasks.task import Example


@dataclass(eq=False)
class Lottery(Chain):
    """The sums of :class:`Chain` in a first turn; the environment replies `A`, and the second turn is a draw.

    A right sum earns 1 in the first turn. In the second, the policy wins ``stake`` if a hash of the problem and of
    what it writes is odd, which nothing that it learns can predict. The score is the sum of both: by the score of the
    whole response, the noise of the second turn drowns the first; by the reward of each turn, it does not. With
    ``stake=0`` there is no noise, and credit by turn has nothing to separate. Held-out problems have no stake, so
    evaluations score the sums alone.

    Args:
        stake: what a won draw earns, at least 0.

    Raises:
        OutOfRange: for a setting outside its range.
    """

    stake: float = 4.0
    name = "lottery"

    def __post_init__(self) -> None:
        self.require(stake=(0, 1e6))
        super().__post_init__()

    def reply(self, example: Example, completion: str) -> str | None:
        """The reply to the first turn; None after the second."""
        return "A" if completion.count("$") == 1 else None

    def turn_rewards(self, example: Example, completion: str) -> list[float]:
        """The rewards of the two turns. Never raises, whatever the text."""
        problem: Expression = example.answer
        guess, end, _ = completion.partition("$")[2].partition("$")
        held_out = zlib.crc32(str(problem).encode()) % EVAL_SHARE == 0
        won = bool(end) and not held_out and zlib.crc32(f"{problem} {guess}".encode()) % 2 == 1
        return [super().score(example, completion), self.stake * won]

    def score(self, example: Example, completion: str) -> float:
        """The sum of both turns' rewards. Never raises, whatever the text."""
        return sum(self.turn_rewards(example, completion))
