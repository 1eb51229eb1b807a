"""Settings of ``actor_rollout_ref`` that an objective replaces, and settings with which it cannot run."""

from __future__ import annotations

from typing import Any

from verl.workers.config import ActorConfig, PolicyLossConfig

from rlstab.adapters.settings import check_reference, defaults_of, require_defaults
from rlstab.core.objective import TokenObjective
from rlstab.errors import ConfigError
from rlstab.hosts import facts

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
        ConfigError: names the setting and what to write instead.
    """
    actor, defaults, known = config.actor, defaults_of(ActorConfig), facts("verl")
    require_defaults(_ACTOR, actor, defaults, known["instead"])
    loss = defaults_of(PolicyLossConfig)
    require_defaults(f"{_ACTOR}.policy_loss", actor.policy_loss, loss, known["instead_of_policy_loss"])
    check_reference(
        objective,
        loaded=f"{_ACTOR}.use_kl_loss" if actor.use_kl_loss else "",
        switch="use_kl_loss=false",
        on=f"{_ACTOR}.use_kl_loss=true ",
        coefficient=f"{_ACTOR}.kl_loss_coef",
        value=actor.kl_loss_coef,
        idle=defaults["kl_loss_coef"],
    )
    if actor.strategy not in ENGINES:
        raise ConfigError(
            f"{_ACTOR}.strategy = {actor.strategy!r}: the adapter knows verl's engine for FSDP alone. Write fsdp2."
        )
    if distilled:
        raise ConfigError(
            "distillation.enabled adds the loss of a teacher, and the objective is the loss. Switch it off."
        )
