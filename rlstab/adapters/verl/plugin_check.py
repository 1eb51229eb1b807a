"""Check that verl loads the adapter: verl logs a failing plugin only at debug level, where it goes unnoticed."""

import importlib
import os
import warnings
from importlib.metadata import entry_points

from rlstab.adapters.verl.plugin import HOME, ActorWorker
from rlstab.errors import HostError

GROUP, NAME = "verl.plugins", "rlstab"
#: verl's own switch: ``auto``, ``none``, or the names of the plugins to load.
SWITCH = "VERL_USE_EXTERNAL_PLUGINS"


def check_plugin() -> None:
    """Load every plugin as verl does, and check that verl's workers have the adapter.

    Warns of other plugins that fail to load, which verl hides.

    Raises:
        HostError: the adapter's entry point is missing, disabled or broken, or verl's workers do not have it.
    """
    points = entry_points(group=GROUP)
    for point in points:
        try:
            point.load()
        except Exception as error:  # importing a plugin runs arbitrary code
            hidden = f"({point.value}) does not load, and verl hides it: {type(error).__name__}: {error}."
            if point.name == NAME:
                raise HostError(f"the entry point '{NAME}' {hidden} Fix that, or install rlstab again.") from error
            warnings.warn(f"verl's plugin '{point.name}', which is not this adapter, {hidden}", stacklevel=3)
    if NAME not in points.names:
        raise HostError(
            f"no entry point '{NAME}' in the group '{GROUP}'. Install rlstab (pip install -e .): PYTHONPATH alone is "
            f"not enough."
        )
    switch = os.environ.get(SWITCH, "auto").strip().lower()
    if switch != "auto" and NAME not in map(str.strip, switch.split(",")):
        raise HostError(
            f"{SWITCH}={os.environ[SWITCH]!r} keeps verl from loading the adapter. Unset it, or add rlstab."
        )
    importlib.import_module("rlstab.adapters.verl.worker")
    host = importlib.import_module(HOME).ActorRolloutRefWorker
    actor = vars(host).get("actor_worker_cls")
    if not isinstance(actor, ActorWorker):
        raise HostError(f"another package set actor_worker_cls to {actor}. Do not load that package.")
