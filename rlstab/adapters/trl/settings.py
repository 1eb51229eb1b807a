"""What ``GRPOConfig`` says about the loss, as an objective; and what it has to say beside one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from accelerate import DistributedType
from trl import GRPOConfig

from rlstab.adapters.settings import defaults_of
from rlstab.config import load_objective
from rlstab.core.compose import Composition
from rlstab.errors import ConfigError
from rlstab.hosts import CORRECTION_SETTING, trl_settings

#: What decides TRL's own loss and is written in the objective instead; :func:`objective_of` says how.
REPLACED = (
    *("loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level"),
    *("sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    *("top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef", "use_adaptive_entropy"),
    *("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
)
#: Optimizers that step inside the backward pass, where no step can be refused.
_STEPS_EARLY = ("lomo", "layerwise")


def objective_of(config: GRPOConfig) -> list[dict[str, Any]]:
    """The objective that is TRL's own loss with these settings, as a list that YAML holds; see :func:`deviations_of`.

    Raises:
        ConfigError: no objective is that loss; names the nearest setting that one has.
    """
    kind, high = config.loss_type, config.epsilon if config.epsilon_high is None else config.epsilon_high
    methods = {
        "cispo": [{"name": "cispo", "cap": high}],
        "sapo": [{"name": "sapo", "positive": config.sapo_temperature_pos, "negative": config.sapo_temperature_neg}],
        "vespo": [
            {
                "name": "vespo",
                **{"positive_power": config.vespo_k_pos, "positive_decay": config.vespo_lambda_pos},
                **{"negative_power": config.vespo_k_neg, "negative_decay": config.vespo_lambda_neg},
                **({"anchor": "rollout"} if config.use_vllm and getattr(config, CORRECTION_SETTING) else {}),
            }
        ],
    }.get(kind) or [_clip(config, high)]
    if kind == "cispo" and high < 1:
        raise ConfigError(
            f"GRPOConfig.epsilon_high = {high} is the largest ratio of loss_type='cispo', and an objective takes none "
            f"below 1. The nearest is epsilon_high=1.0; ScaleRL has 5.0."
        )
    if config.importance_sampling_level == "sequence" and kind != "vespo":
        methods.append({"name": "gspo"})
    if kind in ("grpo", "sapo"):
        methods.append({"name": "sequence_mean"})
    if kind in ("dr_grpo", "luspo"):
        length = config.max_completion_length if kind == "dr_grpo" else 1
        methods.append({"name": "constant_length", "length": length})
    if config.top_entropy_quantile < 1:
        methods.append({"name": "top_entropy", "share": config.top_entropy_quantile, "denominator": "all"})
    if config.off_policy_mask_threshold is not None:
        anchor = "rollout" if config.use_vllm else "old"
        methods.append({"name": "off_policy_mask", "max_gap": config.off_policy_mask_threshold, "anchor": anchor})
    if config.use_adaptive_entropy:
        methods.append(
            {
                "name": "adaptive_entropy",
                **{"target_entropy": config.entropy_target, "initial": config.entropy_coef},
                **{"increment": config.entropy_coef_delta, "low": config.entropy_coef_min},
                "high": config.entropy_coef_max,
            }
        )
    elif config.entropy_coef:
        methods.append({"name": "entropy_bonus", "coefficient": config.entropy_coef})
    if config.beta:
        estimator = "k3_unbiased" if config.use_bias_correction_kl else "k3"
        methods.append({"name": "kl", "coefficient": config.beta, "estimator": estimator, "cap": None})
    return methods


def _clip(config: GRPOConfig, high: float) -> dict[str, Any]:
    """TRL's ``delta`` bounds the ratio before the clip, for both signs of the advantage."""
    clip, delta = {"name": "clip_higher", "low": config.epsilon, "high": high}, config.delta
    if delta is None:
        return clip
    if delta <= 1:
        raise ConfigError(
            f"GRPOConfig.delta = {delta} bounds ratios below 1, and 'clip_higher' cannot. The nearest is delta=1.01."
        )
    return {**clip, "high": min(high, delta - 1), "dual_clip": max(delta, 1 + high) if delta < 1 + high else delta}


def deviations_of(config: GRPOConfig) -> list[str]:
    """Where :func:`objective_of` is TRL's loss only nearly: a sentence each, empty where it is exact."""
    cut = config.gradient_accumulation_steps > 1 or config.world_size > 1
    by_token = config.loss_type in ("dapo", "cispo", "vespo", "bnpo")
    sequence_kl = config.beta and config.use_bias_correction_kl and config.importance_sampling_level == "sequence"
    vespo: dict[str, Any] = next((method for method in objective_of(config) if method["name"] == "vespo"), {})
    every = config.steps_per_generation > config.gradient_accumulation_steps
    bonus, quantile = bool(config.entropy_coef or config.use_adaptive_entropy), config.top_entropy_quantile < 1
    step = "the objective that of the step"
    told = [
        (config.loss_type == "bnpo" and cut, f"bnpo: TRL takes the mean of each micro-batch, {step}."),
        (by_token and every, "tokens: TRL divides by those of the generation, scaled; the objective by the step's."),
        (quantile and cut, f"top_entropy: TRL takes the quantile of each micro-batch, {step}."),
        (bonus and (cut or not by_token), "entropy: TRL takes its mean over a micro-batch, the objective as its loss."),
        (bonus and quantile, "entropy: TRL pays for the tokens of its top-entropy mask, the objective for all."),
        (config.use_adaptive_entropy, "adaptive_entropy: TRL judges a step by the entropy of the one before."),
        (sequence_kl, "kl: TRL multiplies it by the ratio of the response, the objective by that of the token."),
        ("anchor" in vespo, "vespo: TRL puts bounded ratios to the sampler into its kernel, the objective the ratios."),
    ]
    return [sentence for holds, sentence in told if holds]


def check_settings(config: GRPOConfig, objective: Composition, *, derived: bool = False) -> None:
    """Refuse settings that the objective replaces or contradicts, and steps that span generations.

    Args:
        config: as TRL completed it.
        objective: what the trainer shall train by.
        derived: it has what the settings of :data:`REPLACED` say.

    Raises:
        ConfigError: names every such setting and what to write instead: beside this objective, and to train by them.
    """
    wrong, write = _misfits(config, objective, derived=derived)
    if not wrong:
        return
    lines = "\n  ".join(f"GRPOConfig.{sentence}." for sentence in wrong)
    advice = f"Write {_keywords(write)}."
    if any(name in (*REPLACED, "beta") for name in write):
        try:
            own = objective_of(config)
            more = _keywords(_misfits(config, load_objective(own))[1])
            advice += f"\n  Or train by these settings: objective={own!r}{f', with {more}' if more else ''}."
        except ConfigError as error:
            advice += f"\n  No objective is what they say: {error}"
    raise ConfigError(f"{lines}\n  {advice}")


def _misfits(config: GRPOConfig, objective: Composition, *, derived: bool = False) -> tuple[list[str], dict[str, Any]]:
    """A sentence for each setting that does not fit, and what to write."""
    defaults = defaults_of(type(config))
    wrong: list[str] = []
    write: dict[str, Any] = {}
    for name in () if derived else REPLACED:
        if getattr(config, name) != defaults[name]:
            wrong.append(f"{name} = {getattr(config, name)!r} has no effect: the objective is the loss")
            write[name] = defaults[name]
    for name, wanted in trl_settings(objective).items():
        value = getattr(config, name)
        unused = name == CORRECTION_SETTING and (derived or not config.use_vllm)
        if not unused and not wanted.fits(value):
            wrong.append(f"{name} = {value!r}, and {wanted.why}")
            write[name] = wanted.value
    for sentence, instead in (_windows(config), _optimizer(config)):
        wrong += [sentence] if sentence else []
        write |= instead
    return wrong, write


def _keywords(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _windows(config: GRPOConfig) -> tuple[str, dict[str, Any]]:
    """An optimizer step lies in one generation, so that all of it is known before its first backward pass."""
    count, slices = config.gradient_accumulation_steps, config.steps_per_generation
    if slices * config.num_iterations % count == 0:
        return "", {}
    rows = config.generation_batch_size // slices
    whole = next(steps for steps in range(count, sys.maxsize, count) if steps * rows % config.num_generations == 0)
    return (
        f"gradient_accumulation_steps = {count}: a step would span generations, of steps_per_generation={slices} x "
        f"num_iterations={config.num_iterations}",
        {"steps_per_generation": whole, "generation_batch_size": None},
    )


def _optimizer(config: GRPOConfig) -> tuple[str, dict[str, Any]]:
    optimizer = str(getattr(config.optim, "value", config.optim))
    if not any(word in optimizer for word in _STEPS_EARLY):
        return "", {}
    return f"optim = {optimizer!r} steps inside the backward pass: none could be refused", {"optim": "adamw_torch"}


def check_windows(config: GRPOConfig) -> None:
    """Refuse optimizer steps that span generations.

    Raises:
        ConfigError: names the setting, and what to write instead.
    """
    sentence, instead = _windows(config)
    if sentence:
        raise ConfigError(f"GRPOConfig.{sentence}. Write {_keywords(instead)}.")


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
