"""Settings of ``GRPOConfig`` that an objective takes over, and those with which its windows are not whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import DistributedType
from trl import GRPOConfig

from rlstab.adapters.settings import check_reference, defaults_of, kl_settings, require_defaults, require_one_correction
from rlstab.core.objective import TokenObjective
from rlstab.errors import ConfigError

#: What decides TRL's own loss, with what to write in the objective instead.
REPLACED: Mapping[str, str] = {
    "loss_type": "the methods of the objective are the loss, such as sequence_mean, cispo, sapo, vespo",
    "epsilon": "low of clip_higher",
    "epsilon_high": "high of clip_higher",
    "delta": "dual_clip of clip_higher",
    "importance_sampling_level": "gspo",
    "sapo_temperature_pos": "positive of sapo",
    "sapo_temperature_neg": "negative of sapo",
    "vespo_k_pos": "the settings of vespo",
    "vespo_lambda_pos": "the settings of vespo",
    "vespo_k_neg": "the settings of vespo",
    "vespo_lambda_neg": "the settings of vespo",
    "top_entropy_quantile": "top_entropy",
    "entropy_coef": "entropy_bonus",
    "use_adaptive_entropy": "adaptive_entropy",
    "entropy_coef_min": "adaptive_entropy",
    "entropy_coef_max": "adaptive_entropy",
    "entropy_coef_delta": "adaptive_entropy",
    "entropy_target": "adaptive_entropy",
    "off_policy_mask_threshold": "off_policy_mask",
}
#: What TRL multiplies its KL term by the ratio with, and the estimator of ``kl`` that does so.
BIAS_CORRECTION, UNBIASED = "use_bias_correction_kl", "k3_unbiased"
#: Optimizers that step inside the backward pass, where no step can be refused.
_STEPS_EARLY = ("lomo", "layerwise")


def check_settings(config: GRPOConfig, objective: TokenObjective) -> None:
    """Refuse settings that the objective replaces, and windows that are not whole.

    Raises:
        ConfigError: names the setting, and what to write instead.
    """
    require_defaults("GRPOConfig", vars(config), defaults_of(type(config)), REPLACED)
    check_reference(
        objective,
        loaded=f"GRPOConfig.beta = {config.beta}" if config.beta else "",
        switch="beta=0.0",
        on="",
        coefficient="GRPOConfig.beta",
        value=config.beta,
        idle=0.0,
    )
    _check_estimator(config, objective)
    if config.use_vllm and config.vllm_importance_sampling_correction:
        own = "vllm_importance_sampling_correction"
        require_one_correction(objective, f"GRPOConfig.{own}", f"{own}=False")
    check_windows(config)
    optimizer = str(getattr(config.optim, "value", config.optim))
    if any(word in optimizer for word in _STEPS_EARLY):
        raise ConfigError(
            f"GRPOConfig.optim = {optimizer!r} steps inside the backward pass: none could be refused. Take adamw_torch."
        )


def _check_estimator(config: GRPOConfig, objective: TokenObjective) -> None:
    """TRL's switch and the estimator of ``kl`` say the same, in runs of either trainer."""
    corrects = getattr(config, BIAS_CORRECTION)
    estimators = kl_settings(objective, "estimator")
    if not estimators and not corrects:
        raise ConfigError(
            f"GRPOConfig.{BIAS_CORRECTION} = False has no effect without a 'kl' to the reference. Leave it at True."
        )
    for estimator in estimators:
        if corrects != (estimator == UNBIASED):
            other = f"estimator: {UNBIASED}" if corrects else "another estimator"
            raise ConfigError(
                f"GRPOConfig.{BIAS_CORRECTION} = {corrects}, and the estimator of 'kl' is '{estimator}': the "
                f"objective's counts. Write {BIAS_CORRECTION}={not corrects}, or {other} in the objective."
            )


def check_windows(config: GRPOConfig) -> None:
    """An optimizer step lies in one generation, so that all of it is known before its first backward pass."""
    every = config.steps_per_generation * config.num_iterations
    if every % config.gradient_accumulation_steps:
        raise ConfigError(
            f"with gradient_accumulation_steps={config.gradient_accumulation_steps} a step would span generations, of "
            f"steps_per_generation={config.steps_per_generation} x num_iterations={config.num_iterations}. "
            f"Write steps_per_generation={config.gradient_accumulation_steps}, or a multiple."
        )


def check_engine(accelerator: Any) -> None:
    """Refuse an engine that ``accelerate launch --config_file``, the environment or GRPOConfig chose.

    Raises:
        ConfigError: names it.
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        kind = accelerator.distributed_type.value
        raise ConfigError(
            f"accelerate was launched with {kind}, which steps in the backward pass. Launch with FSDP or DDP."
        )
    for kind in ("tp", "cp", "sp"):
        if getattr(accelerator.parallelism_config, f"{kind}_enabled", False):
            raise ConfigError(
                f"parallelism_config has {kind}_size above 1: tensor, context and sequence parallelism share sequences "
                f"between ranks, and the adapter counts every rank as data-parallel. Leave it at 1; FSDP and DDP work."
            )
