"""Tasks: prompts with a reward that can be checked."""

from rlstab.tasks.chain import JUNK, Chain
from rlstab.tasks.countdown import ALPHABET, Countdown
from rlstab.tasks.lottery import Lottery
from rlstab.tasks.reasoning_gym import ReasoningGym
from rlstab.tasks.task import Block, Example, HasBlocks, HasTurns, Message, Split, Task
from rlstab.tasks.text_task import TextTask

__all__ = [
    "ALPHABET",
    "JUNK",
    "Block",
    "Chain",
    "Countdown",
    "Example",
    "HasBlocks",
    "HasTurns",
    "Lottery",
    "Message",
    "ReasoningGym",
    "Split",
    "Task",
    "TextTask",
]
