"""The learning rate of each optimizer step, by a schedule of transformers.

It is a function of the number of the step alone, which the checkpoint has: nothing else has to be saved for a resumed
run to go on bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from transformers import get_scheduler

from rlstab.config.settings import OptimisationSettings
from rlstab.errors import ConfigError


def learning_rate(settings: OptimisationSettings) -> Callable[[int], float]:
    """The learning rate by the number of an optimizer step, from 1.

    Without a schedule it is constant, after a linear warm-up whose first step has ``lr / warmup_optimizer_steps``. A
    schedule gives the first step what transformers' trainer gives it: 0 where there is a warm-up.

    Raises:
        ConfigError: transformers refuses the settings.
    """
    lr, ramp = settings.lr, settings.warmup_optimizer_steps
    if settings.schedule is None:
        return lambda step: lr * (min(1.0, step / ramp) if ramp else 1.0)
    name, options = settings.schedule.name, settings.schedule.options
    if name == "cosine_with_restarts" and "num_cycles" in options:
        options["num_cycles"] = int(options["num_cycles"])
    nothing = torch.optim.SGD([torch.zeros(1)], lr=lr)
    try:
        scheduler = get_scheduler(
            name,
            nothing,
            num_warmup_steps=ramp,
            num_training_steps=settings.optimizer_steps,
            scheduler_specific_kwargs=options,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"optimisation.schedule: {error}. Change it, or optimisation.lr.") from error
    assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    (factor,) = scheduler.lr_lambdas
    return cache(lambda step: lr * float(factor(step - 1)))
