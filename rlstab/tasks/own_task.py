"""A task of the user's own, checked at the door: any object that does what a task does."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, cast, get_args

from rlstab.config.document import Document
from rlstab.config.settings import TASK_GROUP, UserTaskSettings
from rlstab.config.user_code import is_user_code, load_class
from rlstab.errors import ConfigError, RlstabError, did_you_mean, kind_of
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
        try:
            example = found.example(split, 0)
        except RlstabError:
            raise
        except (Exception, SystemExit) as error:  # code of others fails in every way
            raise ConfigError(
                f"{who} raised {type(error).__name__} for example 0 of '{split}': {error}. Mend its method `example`."
            ) from error
        if not isinstance(example, Example) or not isinstance(example.prompt, str):
            raise ConfigError(
                f"{who} gave {kind_of(example)} as example 0 of '{split}', expected a rlstab.tasks.Example whose "
                f"prompt is a text. Return Example(prompt, answer), or Example.chat(messages, answer)."
            )
    return found


def load_task(settings: UserTaskSettings) -> type:
    """The class that a configuration names, by its file or as an installed entry point.

    Raises:
        ConfigError: it cannot be loaded, or is no class.
    """
    place = ("task", "name")
    if is_user_code(settings.code):
        fix = "Name a class with the methods `example` and `score`."
        return load_class(Document.of({}), settings.code, place, "a task", fix)
    points = {one.name: one for one in entry_points(group=TASK_GROUP)}
    if settings.code not in points:
        raise ConfigError(
            f"task.code: no installed package has an entry point '{settings.code}' in {TASK_GROUP}. "
            f"{did_you_mean(settings.code, points)} A class of your own is path/to/file.py:Name."
        )
    try:
        found: object = points[settings.code].load()
    except Exception as error:  # code of others fails in every way
        raise ConfigError(
            f"task.code: the entry point '{settings.code}' ({points[settings.code].value}) cannot be loaded: "
            f"{type(error).__name__}: {error}. Mend the package that has it."
        ) from error
    if not isinstance(found, type):
        raise ConfigError(f"task.code: '{settings.code}' is {kind_of(found)}, not the class of a task. Name a class.")
    return found


def make_task(settings: UserTaskSettings) -> Task:
    """A task of the user's own, made with its options and checked.

    Raises:
        ConfigError: it cannot be made, or lacks what a task has.
    """
    cls = load_task(settings)
    try:
        made = cls(**settings.options)
    except RlstabError:
        raise
    except (Exception, SystemExit) as error:  # code of others fails in every way
        given = ", ".join(f"{name}={value!r}" for name, value in settings.options.items())
        raise ConfigError(
            f"task: {cls.__qualname__}({given}) raised {type(error).__name__}: {error}. Change the settings, or the "
            f"class in {settings.code.rpartition(':')[0] or settings.code}."
        ) from error
    return require_task(made)
