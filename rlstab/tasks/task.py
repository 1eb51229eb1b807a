"""What a task is: examples to prompt with, and a score for each completion."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlstab.tasks.scoring import Workers

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Example:
    """One prompt and whatever its task needs to score a completion of it."""

    prompt: str
    answer: Any


class Task(Protocol):
    """A source of prompts with a verifiable reward.

    Attributes:
        name: a short name for logs.
        keeps_special_tokens: completions are scored with special tokens, such as EOS, in their text.
        size: the number of different examples of each split; None where they are generated without end.
    """

    name: str
    keeps_special_tokens: bool
    size: dict[Split, int | None]

    @property
    def workers(self) -> Workers | None:
        """The processes that score; None where `score` is cheap, executes nothing and cannot hang."""
        ...

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` (0, 1, 2, ...) of a split.

        It depends on the split, the index and the task's own settings alone, so that a resumed run sees what an
        uninterrupted one would have seen.
        """
        ...

    def score(self, example: Example, completion: str) -> float:
        """Return the reward of a completion, in [0, 1].

        May raise: the training loop gives such a completion 0, counts it, and shows the error.
        """
        ...
