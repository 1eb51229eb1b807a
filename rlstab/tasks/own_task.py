"""A task of the user's own, checked at the door: any object that does what a task does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from rlstab.errors import ConfigError, kind_of
from rlstab.tasks.flaky import flaky_share
from rlstab.tasks.scoring import Workers
from rlstab.tasks.task import Example, Split, Task

SPLITS = get_args(Split)


def require_task(task: object) -> Task:
    """The object as a task; its first examples are made once.

    Raises:
        ConfigError: it lacks something, or an example is none.
    """
    kinds: dict[str, tuple[type[Any], str]] = {
        "name": (str, "a short text for logs"),
        "keeps_special_tokens": (bool, "whether completions are scored with special tokens, such as EOS, in them"),
        "size": (Mapping, "the number of examples of 'train' and of 'eval', None where there is no end"),
        "workers": (Workers | None, "None, or the Workers that score"),  # type: ignore[dict-item]  # a union
    }
    who = f"the task {type(task).__qualname__}"
    for name, (kind, what) in kinds.items():
        if not hasattr(task, name) or not isinstance(getattr(task, name), kind):
            has = f"has {kind_of(getattr(task, name))}" if hasattr(task, name) else "has none"
            raise ConfigError(f"{who} needs the attribute `{name}`, {what}; it {has}. Add it to the class.")
    for name, arguments in (("example", "split, index"), ("score", "example, completion")):
        if not callable(getattr(task, name, None)):
            raise ConfigError(f"{who} has no method `{name}`. Add it to the class: def {name}(self, {arguments}).")
    flaky_share(task)
    found = cast(Task, task)
    for split in SPLITS:
        size = found.size.get(split, 0)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"{who} has size['{split}'] = {size!r}, expected an int of at least 1, or None. Set it.")
        example = found.example(split, 0)
        if not isinstance(example, Example) or not isinstance(example.prompt, str):
            raise ConfigError(
                f"{who} gave {kind_of(example)} as example 0 of '{split}', expected a rlstab.tasks.Example whose "
                f"prompt is a text. Return Example(prompt, answer), or Example.chat(messages, answer)."
            )
    return found
