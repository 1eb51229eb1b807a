"""From the settings of a task to the task."""

from __future__ import annotations

from rlstab.config.runs import ChainSettings, CountdownSettings, ReasoningGymSettings, TaskSettings
from rlstab.tasks import Chain, Countdown, Jsonl, ReasoningGym, Task


def build_task(settings: TaskSettings) -> Task:
    """The task that a configuration describes.

    Raises:
        DataError, MissingPackage: its data or its package cannot be used.
    """
    options = settings.model_dump(exclude={"name"})
    if isinstance(settings, CountdownSettings):
        return Countdown(**options)
    if isinstance(settings, ChainSettings):
        return Chain(**options)
    if isinstance(settings, ReasoningGymSettings):
        return ReasoningGym(**options)
    return Jsonl(**{name: value for name, value in options.items() if name != "seed"})  # a file is in its own order
