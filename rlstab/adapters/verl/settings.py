"""Settings of ``actor_rollout_ref`` that an objective replaces, and settings with which it cannot run."""

from __future__ import annotations

from typing import Any

from verl.workers.config import ActorConfig, PolicyLossConfig

from rlstab.adapters.settings import defaults_of, misfits
from rlstab.config.document import flow
from rlstab.core.objective import TokenObjective
from rlstab.errors import ConfigError
from rlstab.hosts import facts, verl_settings

#: Engines that the tests run.
ENGINES = ("fsdp", "fsdp2")
_ACTOR = "actor_rollout_ref.actor"


def check_settings(config: Any, objective: TokenObjective, *, distilled: bool = False) -> None:
    """Refuse settings that the objective replaces, and engines that were not tested.

    Args:
        config: ``actor_rollout_ref``, as Hydra composed it.
        objective: usually a composition.
        distilled: whether verl adds the loss of a teacher.

    Raises:
        ConfigError: names every setting that does not fit, and what to write instead.
    """
    known, lines = facts("verl"), list[str]()
    for section, given, of_class, instead, wanted in (
        (_ACTOR, config.actor, ActorConfig, known["instead"], verl_settings(objective)),
        (f"{_ACTOR}.policy_loss", config.actor.policy_loss, PolicyLossConfig, known["instead_of_policy_loss"], {}),
    ):
        defaults = {name: default for name, default in defaults_of(of_class).items() if name in {*instead} & {*given}}
        wrong, write = misfits(given.get, defaults, wanted)
        for sentence, (name, value) in zip(wrong, write.items(), strict=True):
            hint = f", and in the objective: {instead[name]}" if name in instead else ""
            lines.append(f"{section}.{sentence}. Write {section}.{name}={flow(value)}{hint}.")
    if lines:
        raise ConfigError("\n  ".join(lines))
    actor = config.actor
    if actor.strategy not in ENGINES:
        raise ConfigError(f"{_ACTOR}.strategy = {actor.strategy!r}: the adapter knows FSDP alone. Write fsdp2.")
    if distilled:
        raise ConfigError("distillation.enabled adds a loss, and the objective is the loss. Switch it off.")
