"""What a task is: examples to prompt with, and a score for each completion."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlstab.tasks.workers import Workers

#: Learnt from, or held out.
Split = Literal["train", "eval"]

#: Number of examples that tell the data of two runs apart, of a finite and of an unlimited split.
TOLD_BY, TOLD_BY_ENDLESS = 100_000, 64


@dataclass(frozen=True)
class Message:
    """One turn of a chat by `system`, `user` or `assistant`, or by another role that the model's chat template
    knows.
    """

    role: str
    content: str


@dataclass(frozen=True)
class Example:
    """One prompt and what its task needs to score a completion.

    Attributes:
        prompt: the text; of a chat, for people and scorers, its messages one after another.
        answer: what the scorer compares a completion with.
        messages: the chat, if the prompt is one; make such an example with :meth:`chat`.
        where: what errors call the example: a file and a line.
    """

    prompt: str
    answer: Any
    messages: tuple[Message, ...] = ()
    where: str = field(default="", compare=False, repr=False)

    @classmethod
    def chat(cls, messages: Iterable[Message], answer: Any, where: str = "") -> Example:
        """An example whose prompt is a chat, which needs `rollout.chat`."""
        turns = tuple(messages)
        return cls("\n".join(f"{turn.role}: {turn.content}" for turn in turns), answer, turns, where)


class Task(Protocol):
    """A source of prompts with a verifiable reward.

    Any object with these attributes is a task: `rlstab.train.train(run, task=mine)`. If it also has a number `flaky`,
    at least 0 and below 1, training loses that share of its scores, to study noise in rewards: a lost score is 0. The
    seed of the run and the identity of the response decide which ones; evaluation loses none.

    Attributes:
        name: a short name for logs.
        keeps_special_tokens: whether completions are scored with special tokens, such as EOS, in their text.
        size: the number of different examples of each split; None if it is unlimited. A run repeats a finite training
            split, in its own order.
    """

    name: str
    keeps_special_tokens: bool
    size: dict[Split, int | None]

    @property
    def workers(self) -> Workers | None:
        """The processes that score; None if `score` is cheap and cannot hang."""
        ...

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` (0, 1, 2, ...) of a split; from `size` on they repeat.

        It depends only on the split, the index and the settings of the task. So the index is the identity of a prompt:
        what a run has learnt about the prompt, such as how often it was answered right, is found again when it is
        repeated, and a resumed run sees what an uninterrupted one would have seen.
        """
        ...

    def score(self, example: Example, completion: str) -> float:
        """Return the reward of a completion, usually in [0, 1]; in evaluations, 1 or more counts as correct.

        It may raise, or return something other than a finite number: then the completion gets 0, and the error is
        counted and shown.
        """
        ...


def checksum_of_examples(task: Task) -> str:
    """Hexadecimal digits over the prompts and answers of a task, wherever its data come from: a file, a hub, code.

    Of an unlimited split the first ones are used; of a very large one, some from all over it.
    """
    digest = hashlib.sha256()
    for split, size in sorted(task.size.items()):
        count = min(TOLD_BY_ENDLESS if size is None else size, TOLD_BY)
        digest.update(f"{split} {size}".encode())
        for index in range(count):
            example = task.example(split, index if size is None else index * size // count)
            answer = example.answer if isinstance(example.answer, str | int | float) else None  # others have no text
            digest.update(repr((example.prompt, answer)).encode())
    return digest.hexdigest()


def flaky_share(task: object) -> float:
    """The share of a task's scores that training loses; 0 by default."""
    return float(getattr(task, "flaky", 0.0))


@dataclass(frozen=True)
class Block:
    """A range of characters of a completion, its reward, and the outcome after it.

    Attributes:
        start, stop: bounds of its characters, as in ``completion[start:stop]``.
        reward: the reward of this block.
        outcome: the outcome of the completion up to the end of this block, at least 0. The next block is compared with
            completions of the same outcome, so it should say what the next reward depends on: whether everything is
            right so far.
    """

    start: int
    stop: int
    reward: float
    outcome: int


class HasTurns(Protocol):
    """What a task needs in addition to :class:`Task` for responses of several turns.

    A completion is then all that was said after the prompt: the policy's turns, and the replies between them. A task
    may also have ``turn_rewards(example, completion)``, which returns the reward of each turn, in their order; usually
    they add up to the score. Without it the last turn earns the score.
    """

    def reply(self, example: Example, completion: str) -> str | None:
        """What the environment says to a completion that the policy ended; None ends the response.

        It is tokenised as it is: of a chat, write the markers of the next message too. Its tokens count towards
        ``rollout.max_new_tokens``, and no loss trains them. If it raises, the response ends, and the error is counted.
        """
        ...


class HasBlocks(Protocol):
    """What a task needs in addition to :class:`Task` to be learnt block by block."""

    def blocks(self, example: Example, completion: str) -> list[Block]:
        """The blocks of a completion in their order; they may leave characters out and do not overlap.

        The first blocks of all completions of an example are compared with each other, the second ones, and so on.
        """
        ...
