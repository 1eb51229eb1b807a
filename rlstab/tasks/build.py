"""Makes a task from its settings, and checks a user-defined one."""

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast, get_args

from rlstab.config.document import Document
from rlstab.config.settings import TASK_GROUP, TaskSettings, UserTaskSettings
from rlstab.config.user_classes import blamed, load_class
from rlstab.config.user_code import is_user_code
from rlstab.errors import ConfigError, OutOfRange, UnknownName, did_you_mean, kind_of
from rlstab.tasks.chain import Chain
from rlstab.tasks.countdown import Countdown
from rlstab.tasks.lottery import Lottery
from rlstab.tasks.reasoning_gym import ReasoningGym
from rlstab.tasks.task import Example, Split, Task
from rlstab.tasks.text_task import TextTask
from rlstab.tasks.workers import Workers

#: Tasks that take their settings by name, and tasks that take them as a whole.
_GENERATED: Mapping[str, Callable[..., Task]] = {"countdown": Countdown, "chain": Chain, "lottery": Lottery}
_OTHERS: Mapping[str, Callable[[Any], Task]] = {"reasoning_gym": ReasoningGym, "jsonl": TextTask, "dataset": TextTask}


def build_task(settings: TaskSettings) -> Task:
    """The task that a configuration describes.

    Raises:
        DataError, MissingPackage: its data or its package cannot be used.
        ConfigError: a setting cannot be used, or a user-defined class cannot be loaded or is not a task.
    """
    try:
        if settings.name in _GENERATED:
            return _GENERATED[settings.name](**settings.model_dump(exclude={"name"}))
        if not isinstance(settings, UserTaskSettings):
            return _OTHERS[settings.name](settings)
    except OutOfRange as error:
        raise ConfigError(f"task: {error}") from error
    cls = load_task(settings)
    options = ", ".join(f"{name}={value!r}" for name, value in settings.options.items())
    with blamed(f"task: {cls.__qualname__}({options})", "Change task.options, or the class"):
        return require_task(cls(**settings.options))


def require_loadable(settings: TaskSettings) -> None:
    """Check what can be checked about a task without its data and packages.

    Raises:
        ConfigError, UnknownName: a user-defined class cannot be loaded.
    """
    if isinstance(settings, UserTaskSettings):
        load_task(settings)


def load_task(settings: UserTaskSettings) -> type:
    """The class that a configuration names, by its file or as an installed entry point.

    Raises:
        ConfigError: it cannot be loaded, or is not a class.
        UnknownName: no such entry point is installed.
    """
    if is_user_code(settings.code):
        fix = "Name a class with the methods `example` and `score`."
        return load_class(Document({}), settings.code, ("task", "name"), "a task", fix)
    point = entry_point(TASK_GROUP, settings.code, "task.code", "path/to/file.py:Name")
    with blamed(f"task.code: loading '{settings.code}' ({point.value})", "Correct the package that has it"):
        cls: object = point.load()
    if not isinstance(cls, type):
        raise ConfigError(f"task.code: '{settings.code}' is {kind_of(cls)}, not the class of a task. Name a class.")
    return cls


def entry_point(group: str, name: str, setting: str, alternative: str) -> EntryPoint:
    """The entry point of an installed package.

    Args:
        group: the group to which it belongs.
        name: the name of the entry point.
        setting: the setting that names it, in errors.
        alternative: what may be written instead, in errors.

    Raises:
        UnknownName: no installed package has it.
    """
    points = {point.name: point for point in entry_points(group=group)}
    if name not in points:
        hint = f"{did_you_mean(name, points)} Or write" if points else "Write"
        raise UnknownName(
            f"{setting}: no installed package has an entry point '{name}' in {group}. {hint} {alternative}."
        )
    return points[name]


def require_task(task: object) -> Task:
    """The object as a task, after its first examples were made.

    Raises:
        ConfigError: it lacks an attribute, or what it makes is not an example.
    """
    attributes: dict[str, tuple[Any, str]] = {
        "name": (str, "a short text for logs"),
        "keeps_special_tokens": (bool, "whether completions are scored with special tokens, such as EOS, in them"),
        "size": (Mapping, "the number of examples of 'train' and of 'eval', None where prompts are unlimited"),
        "workers": (Workers | None, "None, or the Workers that score"),
        "example": (Callable, "a method with the arguments (self, split, index)"),
        "score": (Callable, "a method with the arguments (self, example, completion)"),
    }
    owner, absent = f"the task {type(task).__qualname__}", object()
    for name, (kind, description) in attributes.items():
        with blamed(f"{owner}: `{name}`", "Correct the class"):
            value = getattr(task, name, absent)
        if not isinstance(value, kind):
            actual = "nothing" if value is absent else kind_of(value)
            raise ConfigError(f"{owner} needs `{name}`, {description}; it has {actual}. Add it to the class.")
    flaky = getattr(task, "flaky", 0.0)
    if isinstance(flaky, bool) or not isinstance(flaky, int | float) or not 0 <= flaky < 1:
        raise ConfigError(
            f"{owner} has flaky = {flaky!r}, expected a share from 0 to below 1. Change it, or remove it."
        )
    checked = cast(Task, task)
    for split in get_args(Split):
        size = checked.size.get(split, 0)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(
                f"{owner} has size['{split}'] = {size!r}, expected an int of at least 1, or None. Set it."
            )
        with blamed(f"{owner}: example('{split}', 0)", "Correct its method `example`"):
            example = checked.example(split, 0)
        if not isinstance(example, Example) or not isinstance(example.prompt, str):
            raise ConfigError(f"{owner}: example 0 of '{split}' is {kind_of(example)}. Return rlstab.tasks.Example.")
    return checked
