"""From the settings of a task to the task; one that is user-defined is checked at the door."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, cast, get_args

from rlstab.config.document import Document
from rlstab.config.settings import (
    TASK_GROUP,
    ChainSettings,
    CountdownSettings,
    DatasetSettings,
    JsonlSettings,
    ReasoningGymSettings,
    TaskSettings,
    UserTaskSettings,
)
from rlstab.config.user_code import is_user_code, load_class
from rlstab.errors import ConfigError, OutOfRange, RlstabError, did_you_mean, kind_of
from rlstab.files import in_one_line
from rlstab.tasks.chain import Chain
from rlstab.tasks.countdown import Countdown
from rlstab.tasks.data_set import DataSet
from rlstab.tasks.reasoning_gym import ReasoningGym
from rlstab.tasks.scorers import AnswerPattern
from rlstab.tasks.scoring import Workers
from rlstab.tasks.task import Example, Split, Task, flaky_share
from rlstab.tasks.text_task import Jsonl, check_template


def build_task(settings: TaskSettings) -> Task:
    """The task that a configuration describes.

    Raises:
        DataError, MissingPackage: its data or its package cannot be used.
        ConfigError: a setting cannot be used; or it is user-defined, and cannot be loaded or made, or is not a task.
    """
    try:
        match settings:
            case CountdownSettings():
                return Countdown(**settings.model_dump(exclude={"name"}))
            case ChainSettings():
                return Chain(**settings.model_dump(exclude={"name"}))
            case JsonlSettings():
                return Jsonl(settings)
            case DatasetSettings():
                return DataSet(settings)
            case ReasoningGymSettings():
                return ReasoningGym(settings)
    except OutOfRange as error:
        raise ConfigError(f"task: {error}") from error
    return _user_task(settings)


def require_settings(settings: TaskSettings) -> None:
    """Check what can be checked of a task without its data and packages.

    Raises:
        ConfigError: a pattern does not compile or has no group, a template lacks its placeholder, or a user-defined
            class cannot be loaded.
    """
    try:
        match settings:
            case UserTaskSettings():
                load_task(settings)
            case ReasoningGymSettings():
                AnswerPattern(settings.answer_pattern)
                check_template(settings.prompt_template, "question")
            case JsonlSettings() | DatasetSettings():
                AnswerPattern(settings.answer_pattern)
                AnswerPattern(getattr(settings, "right_answer_pattern", None), "right_answer_pattern")
                check_template(settings.prompt_template, "prompt")
    except OutOfRange as error:
        raise ConfigError(f"task: {error}") from error


def _user_task(settings: UserTaskSettings) -> Task:
    cls = load_task(settings)
    try:
        task = cls(**settings.options)
    except RlstabError:
        raise
    except (Exception, SystemExit) as error:  # user code fails in every way
        given = ", ".join(f"{name}={value!r}" for name, value in settings.options.items())
        raise ConfigError(
            f"task: {cls.__qualname__}({given}) raised {in_one_line(error)}. Change the settings, or the class in "
            f"{settings.code.rpartition(':')[0] or settings.code}."
        ) from error
    return require_task(task)


def load_task(settings: UserTaskSettings) -> type:
    """The class that a configuration names, by its file or as an installed entry point.

    Raises:
        ConfigError: it cannot be loaded, or is not a class.
    """
    if is_user_code(settings.code):
        fix = "Name a class with the methods `example` and `score`."
        return load_class(Document.of({}), settings.code, ("task", "name"), "a task", fix)
    points = {point.name: point for point in entry_points(group=TASK_GROUP)}
    if settings.code not in points:
        raise ConfigError(
            f"task.code: no installed package has an entry point '{settings.code}' in {TASK_GROUP}. "
            f"{did_you_mean(settings.code, points)} A user-defined class is path/to/file.py:Name."
        )
    try:
        cls: object = points[settings.code].load()
    except Exception as error:  # user code fails in every way
        raise ConfigError(
            f"task.code: the entry point '{settings.code}' ({points[settings.code].value}) cannot be loaded: "
            f"{in_one_line(error)}. Correct the package that has it."
        ) from error
    if not isinstance(cls, type):
        raise ConfigError(f"task.code: '{settings.code}' is {kind_of(cls)}, not the class of a task. Name a class.")
    return cls


def require_task(task: object) -> Task:
    """The object as a task; its first examples are made once.

    Raises:
        ConfigError: it lacks something, or an example is not one.
    """
    kinds: dict[str, tuple[Any, str]] = {
        "name": (str, "a short text for logs"),
        "keeps_special_tokens": (bool, "whether completions are scored with special tokens, such as EOS, in them"),
        "size": (Mapping, "the number of examples of 'train' and of 'eval', None where there is no end"),
        "workers": (Workers | None, "None, or the Workers that score"),
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
    checked = cast(Task, task)
    for split in get_args(Split):
        size = checked.size.get(split, 0)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"{who} has size['{split}'] = {size!r}, expected an int of at least 1, or None. Set it.")
        try:
            example = checked.example(split, 0)
        except RlstabError:
            raise
        except (Exception, SystemExit) as error:  # user code fails in every way
            raise ConfigError(
                f"{who} raised for example 0 of '{split}': {in_one_line(error)}. Correct its method `example`."
            ) from error
        if not isinstance(example, Example) or not isinstance(example.prompt, str):
            raise ConfigError(
                f"{who} gave {kind_of(example)} as example 0 of '{split}', expected a rlstab.tasks.Example whose "
                f"prompt is a text. Return Example(prompt, answer), or Example.chat(messages, answer)."
            )
    return checked
