"""What a task says about a response besides its score: user code, whose failure costs the response and ends no run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rlstab.tasks import Example

T = TypeVar("T")


def offers(task: Any, name: str) -> bool:
    """Whether a task has a method that not every task has, such as those of :class:`rlstab.tasks.HasTurns`."""
    return callable(getattr(task, name, None))


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
