"""From the settings of a task to the task."""

from __future__ import annotations

from rlstab.config.settings import (
    ChainSettings,
    CountdownSettings,
    DatasetSettings,
    ReasoningGymSettings,
    TaskSettings,
    UserTaskSettings,
)
from rlstab.errors import ConfigError, OutOfRange
from rlstab.tasks import Chain, Countdown, DataSet, Jsonl, ReasoningGym, Task
from rlstab.tasks.answer_pattern import AnswerPattern
from rlstab.tasks.own_task import load_task, make_task
from rlstab.tasks.prompt_template import PromptTemplate


def build_task(settings: TaskSettings) -> Task:
    """The task that a configuration describes.

    Raises:
        DataError, MissingPackage: its data or its package cannot be used.
        ConfigError: it is the user's own, and cannot be loaded or made, or is no task.
    """
    if isinstance(settings, UserTaskSettings):
        return make_task(settings)
    options = settings.model_dump(exclude={"name"})
    if isinstance(settings, CountdownSettings):
        return Countdown(**options)
    if isinstance(settings, ChainSettings):
        return Chain(**options)
    if isinstance(settings, DatasetSettings):
        return DataSet(**options)
    return ReasoningGym(**options) if isinstance(settings, ReasoningGymSettings) else Jsonl(**options)


def require_settings(settings: TaskSettings) -> None:
    """Check what can be checked of a task without its data and packages.

    Raises:
        ConfigError: a pattern does not compile or has no group, a template lacks its placeholder, or the class of a
            task of the user's own cannot be loaded.
    """
    if isinstance(settings, CountdownSettings | ChainSettings):
        return
    if isinstance(settings, UserTaskSettings):
        load_task(settings)
        return
    try:
        AnswerPattern(settings.answer_pattern)
        if isinstance(settings, DatasetSettings):
            AnswerPattern(settings.right_answer_pattern, "right_answer_pattern")
        PromptTemplate(settings.prompt_template, "question" if isinstance(settings, ReasoningGymSettings) else "prompt")
    except OutOfRange as error:
        raise ConfigError(f"task: {error}") from error
