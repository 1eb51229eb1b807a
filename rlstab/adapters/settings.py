"""Settings of a host that an objective replaces: refused by every adapter, in the host's words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlstab.core.compose import walk
from rlstab.core.objective import TokenObjective
from rlstab.errors import ConfigError
from rlstab.hosts import kl_settings, own_correction


def defaults_of(config: type) -> dict[str, Any]:
    """The defaults of a dataclass of settings."""
    return {field.name: field.default for field in dataclasses.fields(config)}


def require_defaults(
    section: str, given: Mapping[str, Any], defaults: Mapping[str, Any], replaced: Mapping[str, str]
) -> None:
    """Refuse settings of the host's loss that differ from their defaults.

    Args:
        section: the host's name for the section, in the error.
        given: its settings by name.
        defaults: their defaults.
        replaced: the settings that an objective replaces, with what to write in it instead.

    Raises:
        ConfigError: names the setting, and what to write instead.
    """
    for name, instead in replaced.items():
        if name in given and name in defaults and given[name] != defaults[name]:
            raise ConfigError(
                f"{section}.{name} = {given[name]!r} has no effect: the objective is the loss. Leave it at "
                f"{defaults[name]!r}, and write in the objective: {instead}."
            )


def check_reference(
    objective: TokenObjective, *, loaded: str, switch: str, on: str, coefficient: str, value: float, idle: float
) -> None:
    """Require that the host loads a reference model if the objective reads one, with the coefficient of ``kl``.

    Args:
        objective: usually a composition.
        loaded: the host's setting that loads the model; empty if it loads none.
        switch: that setting with the value that loads no model.
        on: what to write to load it, without the coefficient.
        coefficient: the host's setting of the coefficient.
        value: of that setting.
        idle: its value if no method reads a reference model.

    Raises:
        ConfigError: names the setting, and what to write instead.
    """
    readers = [leaf.name for leaf in walk(objective, observed=True) if "ref_logprobs" in leaf.method.needs]
    wanted = kl_settings(objective, "coefficient")
    if loaded and not readers:
        raise ConfigError(
            f"{loaded} has no effect: no method of the objective reads the reference model. Write {switch}, or add to "
            f"the objective: {{name: kl, coefficient: {value}}}."
        )
    if readers and not loaded:
        raise ConfigError(
            f"'{readers[0]}' reads 'ref_logprobs', and no reference model is loaded. Write {on}{coefficient}="
            f"{next(iter(wanted), value or 0.001)!r}."
        )
    allowed = wanted if readers else [idle]
    if allowed and value not in allowed:
        raise ConfigError(
            f"{coefficient} = {value} has no effect: 'kl' has its own. Write {coefficient}={allowed[0]!r}."
        )


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
