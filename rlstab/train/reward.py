"""Rewards: a scorer that raises costs its sample the reward, never the run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlstab.tasks import Example, Task


@dataclass
class Scores:
    """Rewards of some responses.

    Attributes:
        rewards: ``(R,)`` float64.
        errors: what raised, one text per sample that got 0 for it.
    """

    rewards: Tensor
    errors: list[str] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of several lists of responses in a row."""
        rewards = [torch.zeros(0, dtype=torch.float64), *(one.rewards for one in parts)]
        return cls(torch.cat(rewards), [text for one in parts for text in one.errors])


def score(
    task: Task, examples: Sequence[Example], texts: Sequence[str], *, stop: threading.Event | None = None
) -> Scores:
    """Score each text against its example; a scorer that raises gives 0 and is remembered.

    Args:
        task: whose scorer is asked.
        examples: one per text.
        texts: the responses.
        stop: once set, nobody waits for the rest any more, which is left out.
    """
    rewards, errors = [], []
    for example, text in zip(examples, texts, strict=True):
        if stop is not None and stop.is_set():
            break
        try:
            rewards.append(float(task.score(example, text)))
        except (Exception, SystemExit) as error:  # foreign code: whatever it raises belongs to this sample
            rewards.append(0.0)
            errors.append(f"{type(error).__name__}: {error} (completion {text[:80]!r})")
    return Scores(torch.tensor(rewards, dtype=torch.float64), errors)
