"""Whether verl loads the adapter: verl logs a plugin that fails at debug level only, which nobody sees."""

from __future__ import annotations

import importlib
import os
import warnings
from importlib.metadata import EntryPoint, entry_points

from rlstab.adapters.verl.plugin import HOME, ActorWorker
from rlstab.errors import HostError

GROUP, NAME = "verl.plugins", "rlstab"
#: verl's own switch: ``auto``, ``none``, or the names of the plugins to load.
SWITCH = "VERL_USE_EXTERNAL_PLUGINS"


def check_plugin() -> None:
    """Load every plugin of verl as verl does, and look whether the adapter is in its place.

    Plugins of others that do not load are warned of: verl hides them.

    Raises:
        HostError: the adapter's entry point is missing, switched off or broken, or verl's workers do not have it.
    """
    found = {one: _failure(one) for one in entry_points(group=GROUP)}
    for one, error in found.items():
        if one.name != NAME and error is not None:
            warnings.warn(
                f"verl's plugin '{one.name}' ({one.value}), which is not this adapter, does not load, and verl hides "
                f"it: {type(error).__name__}: {error}.",
                stacklevel=3,
            )
    own = {one: error for one, error in found.items() if one.name == NAME}
    if not own:
        raise HostError(
            f"no entry point '{NAME}' in the group '{GROUP}': verl does not know of the adapter. Install rlstab as a "
            f"package (pip install -e . in its folder), not by PYTHONPATH alone."
        )
    for one, error in own.items():
        if error is not None:
            raise HostError(
                f"the entry point '{NAME}' ({one.value}) does not load, and verl hides it: {type(error).__name__}: "
                f"{error}. Mend that, or install rlstab again."
            ) from error
    if not _is_on(os.environ.get(SWITCH, "auto")):
        raise HostError(
            f"{SWITCH}={os.environ[SWITCH]!r} keeps verl from loading the adapter. Unset it, or add rlstab."
        )
    importlib.import_module("rlstab.adapters.verl.worker")
    host = importlib.import_module(HOME).ActorRolloutRefWorker
    if not isinstance(vars(host).get("actor_worker_cls"), ActorWorker):
        raise HostError(
            f"another package set ActorRolloutRefWorker.actor_worker_cls to {vars(host).get('actor_worker_cls')}, in "
            f"the place of the adapter. Do not load that package."
        )


def _failure(one: EntryPoint) -> Exception | None:
    try:
        one.load()
    except Exception as error:  # whatever a plugin does when it is imported
        return error
    return None


def _is_on(policy: str) -> bool:
    allowed = policy.strip().lower()
    return allowed == "auto" or NAME in [one.strip() for one in allowed.split(",")]
