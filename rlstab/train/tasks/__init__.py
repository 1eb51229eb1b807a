"""Tasks: prompts with a reward that can be checked."""

from rlstab.train.tasks.chain import JUNK, Chain
from rlstab.train.tasks.countdown import ALPHABET, Countdown
from rlstab.train.tasks.jsonl import Jsonl
from rlstab.train.tasks.reasoning_gym import ReasoningGym
from rlstab.train.tasks.task import Example, Split, Task

__all__ = ["ALPHABET", "JUNK", "Chain", "Countdown", "Example", "Jsonl", "ReasoningGym", "Split", "Task"]
