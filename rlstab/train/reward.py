"""Rewards: a scorer that raises or hangs costs its sample the reward, never the run."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from rlstab.tasks import Example, Task
from rlstab.tasks.scoring import Outcome
from rlstab.visible import visible


@dataclass
class Scores:
    """Rewards of some responses.

    Attributes:
        rewards: ``(R,)`` float64.
        errors: what raised, one text per sample that got 0 for it.
        timed_out: places of the samples that got 0 because scoring them took too long.
    """

    rewards: Tensor
    errors: list[str] = field(default_factory=list)
    timed_out: list[int] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of several lists of responses in a row."""
        rewards = [torch.zeros(0, dtype=torch.float64), *(one.rewards for one in parts)]
        starts = accumulate((len(one.rewards) for one in parts), initial=0)
        timed_out = [start + place for start, one in zip(starts, parts, strict=False) for place in one.timed_out]
        return cls(torch.cat(rewards), [text for one in parts for text in one.errors], timed_out)


def score(
    task: Task, examples: Sequence[Example], texts: Sequence[str], *, stop: threading.Event | None = None
) -> Scores:
    """Score each text against its example; a scorer that raises or takes too long gives 0 and is remembered.

    Args:
        task: whose scorer is asked.
        examples: one per text.
        texts: the responses.
        stop: once set, nobody waits for the rest any more, which is left out.
    """
    if task.workers is not None:
        pairs = [(example.answer, text) for example, text in zip(examples, texts, strict=True)]
        outcomes = task.workers.score(pairs, stop)
    else:
        outcomes = [_outcome(task, *pair) for pair in zip(examples, texts, strict=True) if not _set(stop)]
    shown = [
        visible(f"{one.error} (completion {text[:80]!r})", spaces=False)
        for one, text in zip(outcomes, texts, strict=False)
        if one.error is not None
    ]
    return Scores(
        torch.tensor([one.score for one in outcomes], dtype=torch.float64),
        shown,
        [place for place, one in enumerate(outcomes) if one.timed_out],
    )


def _outcome(task: Task, example: Example, text: str) -> Outcome:
    try:
        return Outcome(float(task.score(example, text)))
    except (Exception, SystemExit) as error:  # foreign code: whatever it raises belongs to this sample
        return Outcome(error=f"{type(error).__name__}: {error}")


def _set(stop: threading.Event | None) -> bool:
    return stop is not None and stop.is_set()
