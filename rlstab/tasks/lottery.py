"""Lottery: two draws in two turns. The first can be learnt, the second is chance, whose noise drowns the first."""

import random
import re
import zlib
from dataclasses import dataclass

from rlstab.tasks.chain import Chain
from rlstab.tasks.generated import EVAL_SHARE
from rlstab.tasks.task import Example


@dataclass(eq=False)
class Lottery(Chain):
    """Prompts like `Q4+7-2=4+7=11;11-2=9;A`: the policy names a number, the environment replies `A`, it names another.

    In the first turn an even number wins 1, whatever the sum is. In the second turn the policy wins ``stake`` if a hash
    of the prompt and of what it writes is odd, which nothing that it learns can predict. The score is the sum of both:
    by the score of the whole response, the noise of the second turn drowns the first; by the reward of each turn, it
    does not. With ``stake=0`` no noise reaches the tokens of the first turn, but its own reaches those of the second.
    With ``shared`` credit by turn can separate nothing at all: it only makes the gradient longer. Held-out prompts have
    no stake, so that evaluations score the first turn alone.

    Args:
        stake: what the second turn may win, at least 0.
        shared: whether each turn earns half of the score, so that the rewards of turns do not tell the turns apart.

    Raises:
        OutOfRange: for a setting outside its range.
    """

    stake: float = 4.0
    shared: bool = False
    name = "lottery"

    def __post_init__(self) -> None:
        self.require(stake=(0, 1e6))
        super().__post_init__()

    def draw(self, rng: random.Random) -> tuple[Example, str]:
        """A prompt, and the sum in it, which is the `answer`."""
        example, problem = super().draw(rng)
        total, steps = 0, ""
        for index, term in enumerate(example.answer.terms):
            steps += f"{total}{term:+d}={total + term};" if index else ""
            total += term
        return Example(f"Q{problem}={steps}A", problem), problem

    def reply(self, example: Example, completion: str) -> str | None:
        """The reply to the first turn; None after the second."""
        return "A" if completion.count("$") == 1 else None

    def turn_rewards(self, example: Example, completion: str) -> list[float]:
        """The rewards of the two turns. Never raises, whatever the text."""
        first, _, rest = completion.partition("$")
        second, end, _ = rest.partition("$")
        held_out = zlib.crc32(str(example.answer).encode()) % EVAL_SHARE == 0
        won = bool(end) and not held_out and zlib.crc32(f"{example.prompt} {second}".encode()) % 2 == 1
        rewards = [float(re.fullmatch("-?[0-9]?[02468]", first) is not None), self.stake * won]
        return [sum(rewards) / 2] * 2 if self.shared else rewards

    def score(self, example: Example, completion: str) -> float:
        """The sum of both turns' rewards. Never raises, whatever the text."""
        return sum(self.turn_rewards(example, completion))
