"""The engines that TRL may be launched with, and those that the adapter cannot train in."""

from __future__ import annotations

from typing import Any

from accelerate import DistributedType

from rlstab.errors import ConfigError


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
