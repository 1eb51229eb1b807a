"""Rewards: a scorer that raises or hangs costs its sample the reward, never the run."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from rlstab.core.random import uniform
from rlstab.tasks import Example, Task
from rlstab.tasks.reward_function import packed
from rlstab.tasks.rewards import Reward, Rewards
from rlstab.tasks.scoring import Outcome, Workers
from rlstab.visible import visible

#: Added to the run's seed where a flaky grader draws what it loses.
STREAM = 1_000_000_207


@dataclass
class Scores:
    """Rewards of some responses.

    Attributes:
        rewards: ``(R,)`` float64, the weighted sum.
        errors: what raised, one text per sample and reward that got 0 for it.
        timed_out: places of the samples of which a reward got 0 because it took too long.
        parts: ``(R,)`` float64 by the name of a reward, before its weight; empty where the task's scorer is alone.
    """

    rewards: Tensor
    errors: list[str] = field(default_factory=list)
    timed_out: list[int] = field(default_factory=list)
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def joined(cls, lists: Sequence[Scores], names: Sequence[str] = ()) -> Scores:
        """The scores of several lists of responses in a row; ``names`` are those of the parts, for no list at all."""
        none = torch.zeros(0, dtype=torch.float64)
        starts = accumulate((len(one.rewards) for one in lists), initial=0)
        return cls(
            torch.cat([none, *(one.rewards for one in lists)]),
            [text for one in lists for text in one.errors],
            [start + place for start, one in zip(starts, lists, strict=False) for place in one.timed_out],
            {name: torch.cat([none, *(one.parts[name] for one in lists)]) for name in names},
        )


def score(
    task: Task,
    examples: Sequence[Example],
    texts: Sequence[str],
    *,
    rewards: Rewards = Rewards(),  # noqa: B008  # frozen
    stop: threading.Event | None = None,
) -> Scores:
    """Score each text against its example; what raises or takes too long gives 0 and is remembered.

    Args:
        task: whose scorer is asked.
        examples: one per text.
        texts: the responses.
        rewards: what is measured, and with which weights.
        stop: once set, nobody waits for the rest any more, which is left out.
    """
    found = {one.name: _outcomes(one, task, examples, texts, stop) for one in rewards}
    count = min(map(len, found.values()))  # fewer than texts once `stop` is set
    parts = {
        name: torch.tensor([one.score for one in outcomes[:count]], dtype=torch.float64)
        for name, outcomes in found.items()
    }
    return Scores(
        _weighted(rewards, parts),
        [
            visible(f"{f'{name}: ' if rewards.names else ''}{one.error} (completion {text[:80]!r})", spaces=False)
            for name, outcomes in found.items()
            for one, text in zip(outcomes, texts, strict=False)
            if one.error is not None
        ],
        [place for place in range(count) if any(outcomes[place].timed_out for outcomes in found.values())],
        {name: parts[name] for name in rewards.names},
    )


def without_lost(scores: Scores, rewards: Rewards, share: float, seed: int, sequence_ids: Tensor) -> Scores:
    """What a flaky grader hands on: 0 for a share of the task's own scores, as if these answers had been wrong.

    Args:
        scores: of responses.
        rewards: what they are made of; functions of the user's own lose nothing.
        share: that is lost.
        seed: of the run.
        sequence_ids: ``(R,)`` int64, of the responses.
    """
    lost = uniform(seed + STREAM, sequence_ids, torch.tensor(0)) < share
    if not rewards.names:
        return replace(scores, rewards=scores.rewards.masked_fill(lost, 0.0))
    parts = {
        one.name: scores.parts[one.name].masked_fill(lost, 0.0) if one.workers is None else scores.parts[one.name]
        for one in rewards
    }
    return replace(scores, rewards=_weighted(rewards, parts), parts=parts)


def _weighted(rewards: Rewards, parts: Mapping[str, Tensor]) -> Tensor:
    total = torch.zeros(len(next(iter(parts.values()))), dtype=torch.float64)
    for one in rewards:
        if one.weight:  # what is only measured may be anything
            total = total + one.weight * parts[one.name]
    return total


def _outcomes(
    reward: Reward, task: Task, examples: Sequence[Example], texts: Sequence[str], stop: threading.Event | None
) -> list[Outcome]:
    """Of one reward, in the order of the texts."""
    workers = task.workers if reward.workers is None else reward.workers
    if workers is None:
        return [_outcome(task, *pair) for pair in zip(examples, texts, strict=True) if not _set(stop)]
    if reward.workers is None:
        return workers.score([(example.answer, text) for example, text in zip(examples, texts, strict=True)], stop)
    return _packed(workers, examples, texts, stop)


def _packed(
    workers: Workers, examples: Sequence[Example], texts: Sequence[str], stop: threading.Event | None
) -> list[Outcome]:
    """Of a function of the user's own, which gets the prompt as well; an answer that cannot be sent is an error."""
    asked: dict[int, bytes | Outcome] = {}
    for example in examples:
        if id(example) not in asked:  # once for a group
            try:
                asked[id(example)] = packed(example.prompt, example.answer)
            except Exception as error:  # whatever a class of the user's own raises when it is pickled
                asked[id(example)] = Outcome(error=f"{type(error).__name__}: {error}")
    rows = [asked[id(example)] for example in examples]
    jobs = [(row, text) for row, text in zip(rows, texts, strict=True) if isinstance(row, bytes)]
    scored = iter(workers.score(jobs, stop))
    found = []
    for row in rows:
        outcome = row if isinstance(row, Outcome) else next(scored, None)
        if outcome is None:  # nobody waits any more
            break
        found.append(outcome)
    return found


def _outcome(task: Task, example: Example, text: str) -> Outcome:
    try:
        return Outcome(float(task.score(example, text)))
    except (Exception, SystemExit) as error:  # foreign code: whatever it raises belongs to this sample
        return Outcome(error=f"{type(error).__name__}: {error}")


def _set(stop: threading.Event | None) -> bool:
    return stop is not None and stop.is_set()
