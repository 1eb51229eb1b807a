"""Settings of ``actor_rollout_ref`` that an objective replaces, and settings with which it cannot run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.workers.config import ActorConfig, PolicyLossConfig

from rlstab.adapters.settings import check_reference, defaults_of, require_defaults
from rlstab.core.objective import TokenObjective
from rlstab.errors import ConfigError

#: Settings of ``actor_rollout_ref.actor`` for verl's loss, each with what to write in the objective instead.
REPLACED: Mapping[str, str] = {
    "clip_ratio": "low and high of clip_higher",
    "clip_ratio_low": "low of clip_higher",
    "clip_ratio_high": "high of clip_higher",
    "clip_ratio_c": "dual_clip of clip_higher",
    "loss_agg_mode": "sequence_mean, or constant_length; without either every token weighs the same",
    "loss_scale_factor": "constant_length",
    "entropy_coeff": "entropy_bonus, or adaptive_entropy",
    "kl_loss_type": "the estimator of kl",
    "tau_pos": "positive of sapo",
    "tau_neg": "negative of sapo",
}
#: Likewise, settings of its ``policy_loss``.
REPLACED_LOSS: Mapping[str, str] = {
    "clip_cov_ratio": "share of clip_cov",
    "clip_cov_lb": "low of clip_cov",
    "clip_cov_ub": "high of clip_cov",
    "kl_cov_ratio": "share of kl_cov",
    "ppo_kl_coef": "coefficient of kl_cov",
    "dro_beta": "something else, since rlstab has no DRO",
}
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
    actor, defaults = config.actor, defaults_of(ActorConfig)
    require_defaults(_ACTOR, actor, defaults, REPLACED)
    require_defaults(f"{_ACTOR}.policy_loss", actor.policy_loss, defaults_of(PolicyLossConfig), REPLACED_LOSS)
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
