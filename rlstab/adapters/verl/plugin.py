"""The entry point ``rlstab`` of the group ``verl.plugins``, which verl imports when it is imported itself.

verl hides errors of plugins, so as little as possible is done here: once verl's workers are imported, the class of the
actor is looked up through :class:`ActorWorker`. A run without the adapter gets verl's class; a run with it imports the
adapter at that moment, where an error is seen.
"""

import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from rlstab.adapters.verl.loss_mode import objective_file

#: The module of verl's workers.
HOME = "verl.workers.engine_workers"


class ActorWorker:
    """A descriptor for ``ActorRolloutRefWorker.actor_worker_cls``: the class of the actor, by the loss of a run."""

    def __init__(self, replaced: type) -> None:
        self.replaced = replaced

    def __get__(self, host: Any, owner: type | None = None) -> Any:
        if host is None or objective_file(host.config) is None:
            return self.replaced
        from rlstab.adapters.verl.worker import RLStabTrainingWorker

        return partial(RLStabTrainingWorker, host)


def install() -> None:
    """Put :class:`ActorWorker` into verl's workers, now or when they are imported."""
    if HOME in sys.modules:
        _put_into(sys.modules[HOME])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _put_into(workers: ModuleType) -> None:
    host = getattr(workers, "ActorRolloutRefWorker", None)  # absent while the module is being imported
    if host is not None and not isinstance(vars(host).get("actor_worker_cls"), ActorWorker):
        host.actor_worker_cls = ActorWorker(host.actor_worker_cls)


class _WhenImported(MetaPathFinder):
    """Finds verl's workers as Python does, and patches them once they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != HOME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _put_into(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader only
        return spec


install()
