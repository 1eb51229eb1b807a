"""The settings that ``GRPOConfig`` needs when an objective is the loss."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from accelerate import DistributedType
from trl import GRPOConfig, GRPOTrainer

from rlstab.adapters.host_objective import TRL_LOSS, objective_of
from rlstab.adapters.settings import misfits
from rlstab.config import load_objective
from rlstab.core.compose import Composition
from rlstab.errors import ConfigError
from rlstab.hosts import CORRECTION_SETTING, trl_settings

#: Optimizers that step inside the backward pass, where no step can be refused.
_STEPS_EARLY = ("lomo", "layerwise")


def check_settings(config: GRPOConfig, objective: Composition, *, derived: bool = False) -> None:
    """Refuse settings that the objective replaces or contradicts, and steps that span generations.

    Args:
        config: as TRL completed it.
        objective: what the trainer shall train by.
        derived: whether the objective includes what the settings of ``TRL_LOSS`` say.

    Raises:
        ConfigError: names every such setting, what to write with this objective, and how to train by the settings.
    """
    wrong, write = _misfits(config, objective, derived=derived)
    if not wrong:
        return
    lines = "\n  ".join(f"GRPOConfig.{sentence}." for sentence in wrong)
    advice = f"Write {_keywords(write)}."
    if any(name in (*TRL_LOSS, "beta") for name in write):
        try:
            as_set = objective_of(config)
            more = _keywords(_misfits(config, load_objective(as_set))[1])
            advice += f"\n  Or train by these settings: objective={as_set!r}{f', with {more}' if more else ''}."
        except ConfigError as error:
            advice += f"\n  No objective is what they say: {error}"
    raise ConfigError(f"{lines}\n  {advice}")


def _misfits(config: GRPOConfig, objective: Composition, *, derived: bool = False) -> tuple[list[str], dict[str, Any]]:
    """A sentence for each setting that does not fit, and what to write."""
    wanted = trl_settings(objective)
    if derived or not config.use_vllm:
        wanted.pop(CORRECTION_SETTING, None)  # it acts where vLLM generates
    wrong, write = misfits(partial(getattr, config), {} if derived else TRL_LOSS, wanted)
    for sentence, instead in (_windows(config), _optimizer(config), _fused_loss(config)):
        wrong += [sentence] if sentence else []
        write |= instead
    return wrong, write


def _keywords(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _windows(config: GRPOConfig) -> tuple[str, dict[str, Any]]:
    """An optimizer step must lie in one generation, so that all of it is known before its first backward pass."""
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
    return f"optim = {optimizer!r} steps inside the backward pass: none can be refused", {"optim": "adamw_torch"}


def _fused_loss(config: GRPOConfig) -> tuple[str, dict[str, Any]]:
    """TRL 1.12 and 1.13 have Liger's fused loss, which is called in place of the trainer's."""
    if not config.use_liger_kernel or not hasattr(GRPOTrainer, "compute_liger_loss"):
        return "", {}
    return "use_liger_kernel = True trains by Liger's loss, not by the objective", {"use_liger_kernel": False}


def check_windows(config: GRPOConfig) -> None:
    """Refuse optimizer steps that span generations.

    Raises:
        ConfigError: names the setting, and what to write instead.
    """
    sentence, instead = _windows(config)
    if sentence:
        raise ConfigError(f"GRPOConfig.{sentence}. Write {_keywords(instead)}.")


def check_engine(accelerator: Any) -> None:
    """Refuse engines that are not data-parallel, whether selected by the launcher, the environment or GRPOConfig.

    Raises:
        ConfigError: names it.
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        kind = accelerator.distributed_type.value
        raise ConfigError(f"accelerate was launched with {kind}, which steps in the backward pass. Use FSDP or DDP.")
    for kind in ("tp", "cp", "sp"):
        if getattr(accelerator.parallelism_config, f"{kind}_enabled", False):
            raise ConfigError(
                f"parallelism_config has {kind}_size above 1: tensor, context and sequence parallelism share sequences "
                f"between ranks, and the adapter counts every rank as data-parallel. Leave it at 1; FSDP and DDP work."
            )
