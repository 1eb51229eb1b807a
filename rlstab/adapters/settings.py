"""Settings of a host that an objective replaces: refused by every adapter, in the host's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlstab.core.objective import TokenObjective
from rlstab.errors import ConfigError
from rlstab.hosts import HostSetting, own_correction


def defaults_of(config: type) -> dict[str, Any]:
    """The defaults of a dataclass of settings."""
    return {field.name: field.default for field in dataclasses.fields(config)}


def misfits(
    get: Callable[[str], Any], defaults: Mapping[str, Any], wanted: Mapping[str, HostSetting]
) -> tuple[list[str], dict[str, Any]]:
    """A sentence for each setting of a host that does not fit an objective, and what to write.

    Args:
        get: the value of a setting.
        defaults: of the settings that the objective replaces.
        wanted: the other settings that it needs.
    """
    wrong: list[str] = []
    write: dict[str, Any] = {}
    for name, default in defaults.items():
        if get(name) != default:
            wrong.append(f"{name} = {get(name)!r} has no effect: the objective is the loss")
            write[name] = default
    for name, setting in wanted.items():
        if not setting.fits(get(name)):
            wrong.append(f"{name} = {get(name)!r}, and {setting.why}")
            write[name] = setting.value
    return wrong, write


def require_one_correction(objective: TokenObjective, setting: str, off: str) -> None:
    """Refuse an objective that excludes the host's correction for the sampler.

    Args:
        objective: usually a composition.
        setting: of the host, which switches the correction on.
        off: the setting that switches it off.

    Raises:
        ConfigError: names the method.
    """
    excluding = own_correction(objective)
    if excluding is not None:
        name, why = excluding
        raise ConfigError(f"'{name}' and {setting} exclude each other: {why} Write {off}, or remove '{name}'.")
