"""What a task says about a response besides its score: whether a run can read it, and what happens where it fails."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from rlstab.config.runs import RunConfig
from rlstab.core.compose import walk
from rlstab.errors import ConfigError, MissingSignal
from rlstab.tasks import Example
from rlstab.tasks.task import flaky_share

T = TypeVar("T")

#: Evidence given by a task that knows blocks.
BLOCKS = frozenset({"block_ids", "block_rewards", "block_outcomes"})

#: Evidence given by a task of several turns.
TURNS = frozenset({"turn", "turn_reward", "turn_rewards", "turn_states"})


def offers(task: Any, name: str) -> bool:
    """Whether a task has a method that not every task has, such as those of :class:`rlstab.tasks.HasTurns`."""
    return callable(getattr(task, name, None))


def require_evidence(run: RunConfig, task: Any, signals: Collection[str] = ()) -> None:
    """Check that a task provides the blocks and turns that a run reads, and nothing that they do not allow.

    Args:
        run: the configuration.
        task: the task that is used.
        signals: names of the signals that user-defined functions make.

    Raises:
        MissingSignal: the task has no blocks, no turns, or no rewards of turns.
        ConfigError: blocks are read of responses with several turns; or the task is flaky, which affects neither
            rewards of blocks nor those of turns.
    """
    methods = (leaf.method for leaf in walk(run.composition, observed=True))
    for name, needs in [
        *((method.name, method.needs - {*signals}) for method in methods),
        *((stage.name, stage.needs) for stage in run.pipeline),
    ]:
        blocks, turns = needs & BLOCKS, needs & TURNS
        for read, has, function, protocol in (
            (blocks, "no blocks", "blocks", "HasBlocks"),
            (turns, "one turn", "reply", "HasTurns"),
            (turns & {"turn_reward"}, "no rewards of turns", "turn_rewards", "HasTurns"),
        ):
            if read and not offers(task, function):
                raise MissingSignal(
                    f"'{name}' reads '{min(read)}', and responses of '{task.name}' have {has}. Give the task "
                    f"`{function}`, see rlstab.tasks.{protocol}."
                )
        if blocks and offers(task, "reply"):
            raise ConfigError(f"blocks are read, and responses of '{task.name}' have several turns. Read turns.")
        if turns | blocks - {"block_ids"} and flaky_share(task):
            raise ConfigError(
                f"'{name}' reads blocks or turns, whose rewards '{task.name}' does not lose. Set task.flaky to 0."
            )


def attempt(
    ask: Callable[[Any, Example, str], T],
    task: Any,
    example: Example,
    text: str,
    failed: Callable[[str], None],
    default: T,
) -> T:
    """``ask(task, example, text)``; if it fails, ``default``, and ``failed`` is called with the error."""
    try:
        return ask(task, example, text)
    except Exception as error:
        failed(f"{type(error).__name__}: {error} (completion {text[:80]!r})")
        return default
