"""Rewards of a run: user-defined functions and the scorer of the task; training maximises their weighted sum."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from rlstab.config.settings import TASK, RewardSettings
from rlstab.core.random import uniform
from rlstab.errors import ConfigError, ScorerError
from rlstab.files import in_one_line
from rlstab.tasks.build import entry_point
from rlstab.tasks.scorers import RewardFunction, finite
from rlstab.tasks.task import Example, Task
from rlstab.tasks.workers import Scored, Workers
from rlstab.visible import visible

#: Entry points of other packages that are rewards.
GROUP = "rlstab.rewards"

#: Added to the seed of the run to draw the scores that a flaky grader loses.
STREAM = 1_000_000_207


@dataclass(frozen=True)
class Reward:
    """One of the rewards of a run.

    Attributes:
        name: its name in metrics.
        weight: the factor of the reward in the sum.
        workers: the processes that score; None for the scorer of the task.
        special_tokens: whether it gets completions with their special tokens.
    """

    name: str
    weight: float = 1.0
    workers: Workers | None = None
    special_tokens: bool = False


@dataclass(frozen=True)
class Rewards:
    """All rewards of a run.

    Attributes:
        parts: the rewards that are added, at least one.
    """

    parts: tuple[Reward, ...] = (Reward(TASK),)

    def __iter__(self) -> Iterator[Reward]:
        return iter(self.parts)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of rewards that have their own metrics; empty if the scorer of the task is the only reward."""
        return () if self.parts == (Reward(TASK),) else tuple(reward.name for reward in self.parts)

    @cached_property
    def correctness(self) -> str | None:
        """The reward that is 1 for correct completions: the scorer of the task, if it is one of several."""
        return next((reward.name for reward in self.parts if reward.workers is None and self.names), None)

    def in_words(self) -> Mapping[str, str]:
        """What each reward is, for ``run.json``."""
        parts = {reward.name: reward.workers for reward in self.parts if self.names}
        return {name: TASK if workers is None else str(workers.scorer) for name, workers in parts.items()}


def build_rewards(settings: Sequence[RewardSettings] | None, task: Task, environment: Sequence[str] = ()) -> Rewards:
    """The rewards that a configuration describes, each tried on an empty completion of the first training prompt.

    Args:
        settings: None is only the scorer of the task.
        task: its first example is tried.
        environment: variables that every function may read, in addition to those that its settings name.

    Raises:
        ConfigError: a file or a variable is missing, a function cannot be called or does not return a number.
        UnknownName: no such entry point is installed.
    """
    if settings is None:
        return Rewards()
    rewards = Rewards(
        tuple(Reward(part.name, part.weight, _workers(part, environment), part.special_tokens) for part in settings)
    )
    for reward in rewards:
        if reward.workers is not None:
            example = task.example("train", 0)
            try:
                reward.workers.score_one(example.prompt, "", example.answer)
            except ScorerError as error:
                cured = re.search(r"`(memory|environment|time_limit)`", str(error))
                cure = "" if cured else " Score any text, also an empty one."
                raise ConfigError(f"reward '{reward.name}': {str(error).rstrip('.')}.{cure}") from None
    return rewards


def require_functions(settings: Sequence[RewardSettings] | None, *, load: bool = False) -> None:
    """Check what can be checked about rewards without calling them.

    Args:
        settings: None is only the scorer of the task.
        load: load the functions too, which executes their files, and check their arguments.

    Raises:
        ConfigError: a file is missing.
        UnknownName: no such entry point is installed.
        ScorerError: a function cannot be loaded, or takes other arguments.
    """
    for part in settings or ():
        if (workers := _workers(part)) is not None and load:
            workers.scorer.prepare()


def _workers(settings: RewardSettings, environment: Sequence[str] = ()) -> Workers | None:
    if settings.function == TASK:
        return None
    file, colon, function = settings.function.rpartition(":")
    label = f"reward '{settings.name}'"
    if colon:
        path = Path(file).absolute()
        if not path.is_file():
            raise ConfigError(f"{label}: there is no file {path}. Correct `function`.")
        scorer = RewardFunction(str(path), function)
    else:
        point = entry_point(GROUP, function, label, f"`{TASK}`, or path/to/file.py:function")
        scorer = RewardFunction(point.module, point.attr)
    try:
        return Workers.of(scorer, settings, environment)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from None


# -- scores ------------------------------------------------------------------------------------------------------------


@dataclass
class Scores:
    """Rewards of some responses.

    Attributes:
        rewards: ``(R,)`` float64, the weighted sum; finite.
        errors: one text for each sample and reward that got 0 because of an error.
        timed_out: ``(R,)`` bool, whether a reward got 0 because it took too long.
        parts: ``(R,)`` float64 by the name of a reward, before its weight.
    """

    rewards: Tensor
    errors: list[str]
    timed_out: Tensor
    parts: Mapping[str, Tensor]

    @classmethod
    def joined(cls, lists: Sequence[Scores], rewards: Rewards) -> Scores:
        """The scores of several lists of responses, one after another; there may be none."""
        empty = torch.zeros(0, dtype=torch.float64)
        return cls(
            torch.cat([empty, *(scores.rewards for scores in lists)]),
            [text for scores in lists for text in scores.errors],
            torch.cat([empty.bool(), *(scores.timed_out for scores in lists)]),
            {reward.name: torch.cat([empty, *(scores.parts[reward.name] for scores in lists)]) for reward in rewards},
        )


def score(
    task: Task,
    examples: Sequence[Example],
    texts: Sequence[str],
    *,
    rewards: Rewards = Rewards(),  # frozen
    stop: threading.Event | None = None,
    whole: Sequence[str] | None = None,
) -> Scores:
    """Score each text against its example; a scorer that raises or takes too long gives 0, and the error is kept.

    Args:
        task: its scorer is used.
        examples: one per text.
        texts: the responses.
        rewards: what is measured, and with which weights.
        stop: once set, scores that are still missing are left out.
        whole: the responses with their special tokens, for rewards that ask for them; None if no reward does.
    """
    outcomes: dict[str, list[Scored]] = {}
    for reward in rewards:
        read, scored = texts if whole is None or not reward.special_tokens else whole, list[Scored]()
        if workers := reward.workers or task.workers:
            jobs = [(example.prompt, text, example.answer) for example, text in zip(examples, read, strict=True)]
            scored = workers.score(jobs, stop)
        else:  # by the scorer of the task in this process
            for example, text in zip(examples, read, strict=True):
                if stop is not None and stop.is_set():
                    break
                try:
                    scored.append(Scored(finite(task.score(example, text))))
                except (Exception, SystemExit) as error:  # an error of user code belongs to this sample
                    scored.append(Scored(error=in_one_line(error)))
        outcomes[reward.name] = scored
    count = min(map(len, outcomes.values()))  # fewer than texts once `stop` is set
    parts = {
        name: torch.tensor([outcome.score for outcome in scored[:count]], dtype=torch.float64)
        for name, scored in outcomes.items()
    }
    errors = [
        visible(f"{f'{name}: ' if rewards.names else ''}{outcome.error} (completion {text[:80]!r})", spaces=False)
        for name, scored in outcomes.items()
        for outcome, text in zip(scored, texts, strict=False)
        if outcome.error is not None
    ]
    late = torch.tensor([[outcome.timed_out for outcome in scored[:count]] for scored in outcomes.values()]).any(0)
    return Scores(_weighted(rewards, parts), errors, late, parts)


def without_lost(scores: Scores, rewards: Rewards, share: float, seed: int, sequence_ids: Tensor) -> Scores:
    """The scores that a flaky grader passes on: 0 for a share of them, as if these answers had been wrong.

    Args:
        scores: the scores of the responses.
        rewards: those from which the scores were made; user-defined functions lose nothing.
        share: the share of the scores that is lost.
        seed: the seed of the run.
        sequence_ids: ``(R,)`` int64, of the responses.
    """
    is_lost, parts = uniform(seed + STREAM, sequence_ids, torch.tensor(0)) < share, dict(scores.parts)
    for reward in rewards:
        if reward.workers is None:
            parts[reward.name] = parts[reward.name].masked_fill(is_lost, 0.0)
    return replace(scores, rewards=_weighted(rewards, parts), parts=parts)


def _weighted(rewards: Rewards, parts: Mapping[str, Tensor]) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    return sum((reward.weight * parts[reward.name] for reward in rewards), zero)
