"""A flaky grader: what a task has whose scores training loses some of, to study what noise in rewards does."""

from __future__ import annotations

from typing import Protocol

from rlstab.errors import ConfigError


class HasFlakyGrader(Protocol):
    """What a task has beyond :class:`rlstab.tasks.Task` for training to lose some of its scores.

    A score that is lost is 0. Which ones is decided by the seed of the run and the identity of the response: the same
    ones however the rollout is cut, on any number of processes, and after a resume. Evaluation loses none.

    Attributes:
        flaky: the share that is lost, at least 0 and below 1.
    """

    flaky: float


def flaky_share(task: object) -> float:
    """The share of a task's scores that training loses; 0 for a task that says nothing of it.

    Raises:
        ConfigError: it is no such share.
    """
    share = getattr(task, "flaky", 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise ConfigError(
            f"the task {type(task).__qualname__} has flaky = {share!r}, expected the share of scores that training "
            f"loses, a number of at least 0 and below 1. Change it, or remove the attribute."
        )
    return float(share)
