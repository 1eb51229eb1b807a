"""Token-level stability methods for RL with verifiable rewards, as small exact modules that compose into one loss.

Every name is imported when it is first used, so that commands without tensors start without torch. Type checkers and
editors read ``__init__.pyi``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstab import errors

if TYPE_CHECKING:
    from rlstab.core.compose import Composition

__version__ = "0.2.0"

#: The modules of rlstab in which the names below are defined. Classes of methods are found by the modules of the zoo.
_HOMES = "core.batch core.comm core.compose core.loss core.metadata core.objective core.plan core.policy_outputs"
_HOMES += " core.method_settings core.stats core.step core.terms presets signals zoo"

__all__ = [
    "NOTHING",
    "About",
    "Bounds",
    "Composition",
    "Constants",
    "Gate",
    "Grouped",
    "LossOutput",
    "Mean",
    "NoOpAt",
    "OptimizerStep",
    "Penalty",
    "Plan",
    "PolicyOutputs",
    "Pool",
    "Range",
    "Settled",
    "Stat",
    "State",
    "Surrogate",
    "Terms",
    "Threshold",
    "TokenBatch",
    "TokenObjective",
    "TorchComm",
    "available",
    "compose",
    "errors",
    "load_objective",
    "make_plan",
    "observe",
    "preset",
    "register",
    "to_padded",
    "token_signals",
    "within",
]


def __getattr__(name: str) -> Any:
    homes = [f"rlstab.{room}" for room in _HOMES.split()] if name in __all__ else []
    if name[:1].isupper() and not homes:
        from rlstab.zoo import METHODS

        homes = METHODS.homes(name)
    for home in homes:
        if name in vars(import_module(home)):
            return globals().setdefault(name, vars(import_module(home))[name])
    raise AttributeError(f"module 'rlstab' has no attribute '{name}'")


def __dir__() -> list[str]:
    from rlstab.zoo import METHODS

    return sorted({*__all__, *METHODS.shipped_classes()})


def load_objective(source: str | Path | Mapping[str, Any] | Sequence[Any]) -> Composition:
    """An objective from YAML.

    Args:
        source: path of a YAML file, or what such a file holds: a list of methods, a mapping with the key
            ``objective`` (a run file: the rest is left alone), or the mapping of a single method.

    Raises:
        ConfigError: with file and line: unknown name, value out of range, no such file, not YAML.
        Conflict: the methods do not fit together.
    """
    from rlstab.config import load_objective as load

    return load(source)
