"""Settings of a host that an objective takes over: what every adapter refuses, in the host's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlstab.core.compose import walk
from rlstab.core.objective import TokenObjective
from rlstab.errors import ConfigError


def require_defaults(
    section: str, given: Mapping[str, Any], defaults: Mapping[str, Any], replaced: Mapping[str, str]
) -> None:
    """Refuse settings of the host's own loss that are set.

    Args:
        section: the host's name of the section, in the error.
        given: its settings by name.
        defaults: their defaults.
        replaced: of those that the objective replaces, what to write in it instead.

    Raises:
        ConfigError: names the setting, and what to write instead.
    """
    for name, instead in replaced.items():
        if name in given and name in defaults and given[name] != defaults[name]:
            raise ConfigError(
                f"{section}.{name} = {given[name]!r} has no effect: the objective is the loss. Leave it at "
                f"{defaults[name]!r}, and write in the objective: {instead}."
            )


def reference_readers(objective: TokenObjective) -> list[str]:
    """Names of the methods that read a reference model, observed ones among them."""
    return [leaf.name for leaf in walk(objective, observed=True) if "ref_logprobs" in leaf.method.needs]


def kl_settings(objective: TokenObjective, name: str) -> list[Any]:
    """The values of a setting of ``kl`` in the objective, without 0 and None."""
    values = {getattr(leaf.method, name, None) for leaf in walk(objective) if leaf.method.name == "kl"}
    return sorted(value for value in values if value)


def require_one_correction(objective: TokenObjective, setting: str, off: str) -> None:
    """Refuse an objective that corrects for the sampler where the host does.

    Args:
        objective: usually a composition.
        setting: of the host, which is on.
        off: the line that switches it off.

    Raises:
        ConfigError: names the method.
    """
    acting = [leaf for leaf in walk(objective) if leaf.method.writes - {"lr_scale"}]
    own = [leaf.name for leaf in acting if "rollout_logprobs" in leaf.method.needs]
    if own:
        raise ConfigError(
            f"'{own[0]}' corrects for the sampler, and so does {setting}: together they would do it twice. Write "
            f"{off}, or remove '{own[0]}'."
        )
