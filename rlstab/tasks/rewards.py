"""Rewards of a run: functions of one's own and the task's scorer, each measured, their weighted sum learnt from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rlstab.config.settings import TASK, RewardSettings
from rlstab.errors import ConfigError, ScorerError, UnknownName, did_you_mean
from rlstab.tasks.reward_function import RewardFunction, packed
from rlstab.tasks.scoring import Workers
from rlstab.tasks.task import Task
from rlstab.visible import visible

#: Entry points of other packages that are rewards.
GROUP = "rlstab.rewards"


@dataclass(frozen=True)
class Reward:
    """One of them.

    Attributes:
        name: in metrics.
        weight: its factor in the sum.
        workers: the processes that score; None for the task's own scorer.
    """

    name: str
    weight: float = 1.0
    workers: Workers | None = None


@dataclass(frozen=True)
class Rewards:
    """All of a run.

    Attributes:
        parts: at least one.
    """

    parts: tuple[Reward, ...] = (Reward(TASK),)

    def __iter__(self) -> Iterator[Reward]:
        return iter(self.parts)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of those that have metrics of their own: none where the task's scorer is all there is."""
        return () if self.parts == (Reward(TASK),) else tuple(one.name for one in self.parts)

    @cached_property
    def correctness(self) -> str | None:
        """The reward that says whether a completion is correct, by 1: the task's scorer, where it is one of several."""
        return next((one.name for one in self.parts if one.workers is None and self.names), None)

    def in_words(self) -> Mapping[str, Any]:
        """What they are made of, for ``run.json``: a file by what is in it."""
        return {one.name: _origin(one) for one in self.parts if self.names}


def build_rewards(settings: Sequence[RewardSettings] | None, task: Task) -> Rewards:
    """The rewards that a configuration describes, each tried once: an empty completion of the first training prompt.

    Args:
        settings: None is the task's own scorer alone.
        task: whose first example is tried.

    Raises:
        ConfigError: a file is missing, a function cannot be called or does not return a number.
        UnknownName: no such entry point is installed.
    """
    if settings is None:
        return Rewards()
    rewards = Rewards(tuple(Reward(one.name, one.weight, _workers(one)) for one in settings))
    for one in rewards:
        if one.workers is not None:
            _try(one.name, one.workers, task)
    return rewards


def require_functions(settings: Sequence[RewardSettings] | None) -> None:
    """Check what can be checked of rewards without calling them.

    Raises:
        ConfigError: a file is missing.
        UnknownName: no such entry point is installed.
    """
    for one in settings or ():
        _workers(one)


def _workers(settings: RewardSettings) -> Workers | None:
    if settings.function == TASK:
        return None
    file, colon, function = settings.function.rpartition(":")
    if colon:
        path = Path(file).absolute()
        if not path.is_file():
            raise ConfigError(
                f"reward '{settings.name}': {path} is no file. A relative path starts at the current folder: change "
                f"`function`, or go to the folder that it is meant from."
            )
        scorer = RewardFunction(str(path), function)
    else:
        scorer = _installed(settings)
    return Workers(scorer, settings.workers, settings.time_limit)


def _installed(settings: RewardSettings) -> RewardFunction:
    found = {one.name: one for one in entry_points(group=GROUP)}
    if settings.function not in found:
        raise UnknownName(
            f"reward '{settings.name}': no installed package has an entry point '{settings.function}' in {GROUP}. "
            f"{did_you_mean(settings.function, [*found, TASK])} A function of your own is path/to/file.py:function."
        )
    one = found[settings.function]
    return RewardFunction(one.module, one.attr)


def _try(name: str, workers: Workers, task: Task) -> None:
    example = task.example("train", 0)
    try:
        asked = packed(example.prompt, example.answer)
    except Exception as error:  # whatever a class of the user's own raises when it is pickled
        raise ConfigError(
            f"reward '{name}': the answer of the task's first example cannot be sent to the process that scores: "
            f"{type(error).__name__}: {error}. Make it plain data, such as texts, numbers, lists and dicts."
        ) from error
    try:
        workers.start()
    except ScorerError as error:
        raise ConfigError(f"reward '{name}': {error}") from None
    (outcome,) = workers.score([(asked, "")])
    trial = f"reward '{name}', tried with an empty completion of the first training prompt: "
    if outcome.timed_out:
        raise ConfigError(
            f"{trial}it took longer than {workers.time_limit:g} s. Raise its `time_limit`, or make it faster."
        )
    if outcome.error is not None:
        raise ConfigError(
            f"{trial}{visible(outcome.error, spaces=False).rstrip('.')}. It has to return a number for every text, "
            f"and a completion may be empty."
        )


def _origin(reward: Reward) -> str:
    scorer = None if reward.workers is None else reward.workers.scorer
    if not isinstance(scorer, RewardFunction):
        return TASK
    if not scorer.module.endswith(".py"):
        return f"{scorer.module}:{scorer.function}"
    digest = hashlib.sha256(Path(scorer.module).read_bytes()).hexdigest()[:12]
    return f"{scorer.module}:{scorer.function} (sha256 {digest}...)"
