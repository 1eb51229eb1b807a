"""Tasks: prompts with a reward that can be checked."""

from rlstab.tasks.block import Block, HasBlocks
from rlstab.tasks.chain import JUNK, Chain
from rlstab.tasks.countdown import ALPHABET, Countdown
from rlstab.tasks.data_set import DataSet
from rlstab.tasks.flaky import HasFlakyGrader
from rlstab.tasks.jsonl import Jsonl
from rlstab.tasks.reasoning_gym import ReasoningGym
from rlstab.tasks.task import Example, Message, Prompt, Split, Task

__all__ = [
    "ALPHABET",
    "JUNK",
    "Block",
    "Chain",
    "Countdown",
    "DataSet",
    "Example",
    "HasBlocks",
    "HasFlakyGrader",
    "Jsonl",
    "Message",
    "Prompt",
    "ReasoningGym",
    "Split",
    "Task",
]
