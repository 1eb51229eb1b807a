"""Blocks: stretches of a completion that have a reward of their own."""

from dataclasses import dataclass
from typing import Protocol

from rlstab.tasks.task import Example


@dataclass(frozen=True)
class Block:
    """Some characters of a completion, what they earned, and where the completion then stood.

    Attributes:
        start, stop: of the characters, as in ``completion[start:stop]``.
        reward: of this block.
        outcome: of the completion up to and with this block, at least 0. What comes next is compared with completions
            of the same outcome, so it should say what the next reward depends on: whether all is right so far.
    """

    start: int
    stop: int
    reward: float
    outcome: int


class HasBlocks(Protocol):
    """What a task has beyond :class:`rlstab.tasks.Task` to be learnt block by block."""

    def blocks(self, example: Example, completion: str) -> list[Block]:
        """The blocks of a completion, from its start on; they may leave characters out and do not overlap.

        The first blocks of all completions of an example are compared with each other, the second ones, and so on.
        """
        ...
