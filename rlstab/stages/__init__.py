"""Stages, which act outside the loss, one per file under its name; each is imported only when it is used."""

from rlstab.core.registry import Registry, modules_of
from rlstab.stages.stage import Stage

#: The modules that several stages share.
_SHARED = ("group_relative", "half_sigmoid", "pass_rates", "pipeline", "response_batch", "slots", "stage")
#: The shipped stages: every other module.
STAGES: Registry[Stage] = Registry(modules_of(__name__, *_SHARED), "rlstab.stages", Stage, "stage")
