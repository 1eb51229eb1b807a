"""What a task is: examples to prompt with, and a score for each completion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from rlstab.tasks.scoring import Workers

#: Learnt from, or held out.
Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Message:
    """One turn of a chat: `system`, `user` or `assistant`, or what else the model's chat template knows."""

    role: str
    content: str


#: What a policy is asked: text, or a chat that its tokenizer's template turns into text.
Prompt: TypeAlias = str | tuple[Message, ...]


def in_words(prompt: Prompt) -> str:
    """A prompt for people and scorers to read: the messages of a chat one after another."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{one.role}: {one.content}" for one in prompt)


@dataclass(frozen=True)
class Example:
    """One prompt and whatever its task needs to score a completion of it.

    Attributes:
        prompt: the text; of a chat, its messages :func:`in_words`.
        answer: for the scorer.
        messages: the chat, where the prompt is one; make such an example with :meth:`chat`.
    """

    prompt: str
    answer: Any
    messages: tuple[Message, ...] = ()

    @classmethod
    def chat(cls, messages: Iterable[Message], answer: Any) -> Example:
        """An example that asks with a chat, which needs `rollout.chat`."""
        turns = tuple(messages)
        return cls(in_words(turns), answer, turns)

    @property
    def asked(self) -> Prompt:
        """What the policy gets: the chat, where there is one."""
        return self.messages or self.prompt


class Task(Protocol):
    """A source of prompts with a verifiable reward.

    Any object with these attributes will do: `rlstab.train.train(run, task=mine)`.

    Attributes:
        name: a short name for logs.
        keeps_special_tokens: completions are scored with special tokens, such as EOS, in their text.
        size: the number of different examples of each split; None where they are generated without end. A run goes
            through a training split that has an end again and again, and orders it itself.
    """

    name: str
    keeps_special_tokens: bool
    size: dict[Split, int | None]

    @property
    def workers(self) -> Workers | None:
        """The processes that score; None where `score` is cheap, executes nothing and cannot hang."""
        ...

    def example(self, split: Split, index: int) -> Example:
        """Return example `index` (0, 1, 2, ...) of a split; from `size` on they start again.

        It depends on the split, the index and the task's own settings alone. So the index is the identity of a prompt:
        what a run learns about it, such as how often it is answered right, it finds again when it asks it again; and a
        resumed run sees what an uninterrupted one would have seen.
        """
        ...

    def score(self, example: Example, completion: str) -> float:
        """Return the reward of a completion, usually in [0, 1]: what reaches 1 counts as correct in evaluations.

        May raise: the training loop gives such a completion 0, counts it, and shows the error.
        """
        ...
