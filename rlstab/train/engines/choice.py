"""Which engine a run gets, by its file and by what its launcher asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType

from rlstab.config.runs import RunConfig
from rlstab.config.settings import EngineSettings
from rlstab.core.comm import Comm
from rlstab.errors import ConfigError
from rlstab.train.engines.ddp import Ddp
from rlstab.train.engines.engine import Engine
from rlstab.train.engines.fsdp2 import Fsdp2
from rlstab.train.engines.one_process import OneProcess
from rlstab.train.policy import Policy

Name: TypeAlias = Literal["one process", "ddp", "fsdp2"]

#: Kinds of processes that accelerate may find. What it calls FSDP is ours: it wraps nothing that it is not given.
SUPPORTED = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP}

_INSTEAD = "Launch with torchrun, or with accelerate launch --multi_gpu, and set `engine` in the run file"

#: What ``accelerate launch`` says by a variable that is ``true``, and rlstab does not do.
_REFUSED = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or sequence parallelism",
    "ACCELERATE_USE_SAGEMAKER": "SageMaker's data parallelism",
}

#: What it says of FSDP and rlstab does another way: the values that agree with that way, and what to do.
_SHARDED = {
    "FSDP_RESHARD_AFTER_FORWARD": (("true", "full_shard"), "Each layer is let go after its forward"),
    "FSDP_AUTO_WRAP_POLICY": (("transformer_based_wrap",), "The layers that the model names are sharded, one by one"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ((), "The layers that the model names are sharded, one by one"),
    "FSDP_IGNORED_MODULES": ((), "All weights are sharded"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (("false",), "Activations stay on the device or are made again"),
}

#: What it sets where it was asked for nothing.
_IDLE = {"ACCELERATE_DYNAMO_BACKEND": "no", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}


def require_launcher(environment: Mapping[str, str], run: RunConfig) -> None:
    """Refuse what a launcher asks for and the run would do without.

    Raises:
        ConfigError: names it.
    """
    for variable, what in _REFUSED.items():
        if _true(environment, variable):
            raise ConfigError(f"the launcher asks for {what} ({variable}), which rlstab does not do. {_INSTEAD}.")
    for variable, idle in _IDLE.items():
        found = environment.get(variable, idle)
        if found.lower() != idle:
            raise ConfigError(
                f"the launcher asks for {found} ({variable}), which rlstab does not read. Launch without that; "
                f"optimisation.micro_batch_size is what bounds the memory of a forward."
            )
    precision, wanted = run.optimisation.precision, environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if wanted not in ("no", precision):
        raise ConfigError(
            f"the launcher asks for mixed precision {wanted} (ACCELERATE_MIXED_PRECISION), and optimisation.precision "
            f"is {precision}. Set that, which has fp32 and bf16, and launch with --mixed_precision no."
        )
    if not _true(environment, "ACCELERATE_USE_FSDP"):
        return
    version, name = environment.get("FSDP_VERSION", "1"), run.engine.name
    if version != "2":
        raise ConfigError(
            f"the launcher asks for FSDP version {version}, and rlstab shards by version 2. Launch with "
            f"--fsdp_version 2, or without FSDP."
        )
    if name == "ddp":
        raise ConfigError(
            "the launcher asks for FSDP (ACCELERATE_USE_FSDP), and engine is ddp. Set engine to fsdp2, or launch "
            "without FSDP."
        )
    if _true(environment, "FSDP_OFFLOAD_PARAMS") and not run.engine.offload:
        raise ConfigError(
            "the launcher asks for offload (FSDP_OFFLOAD_PARAMS), and engine.offload is false. Set engine to "
            "{name: fsdp2, offload: true}, or launch without it."
        )
    for variable, (agreeing, instead) in _SHARDED.items():
        found = environment.get(variable, "")
        if found and found.lower() not in agreeing:
            raise ConfigError(
                f"the launcher asks for {found} ({variable}), which rlstab does not do. {instead}: launch without that."
            )
    checkpointing = run.optimisation.gradient_checkpointing
    if _true(environment, "FSDP_ACTIVATION_CHECKPOINTING") and not checkpointing:
        raise ConfigError(
            "the launcher asks for activation checkpointing (FSDP_ACTIVATION_CHECKPOINTING). Set "
            "optimisation.gradient_checkpointing to true, or launch without it."
        )


def engine_name(settings: EngineSettings, accelerator: Accelerator, environment: Mapping[str, str]) -> Name:
    """The engine of a run: ``auto`` takes what the launcher asks for, and no shards where it asks for nothing.

    Raises:
        ConfigError: the processes are of a kind that nobody has tried.
    """
    if accelerator.distributed_type not in SUPPORTED:
        raise ConfigError(
            f"accelerate finds processes of the type {accelerator.distributed_type.value}; rlstab runs on CPUs and on "
            f"CUDA devices. {_INSTEAD}."
        )
    if settings.name == "fsdp2" or (settings.name == "auto" and _true(environment, "ACCELERATE_USE_FSDP")):
        return "fsdp2"
    return "ddp" if accelerator.num_processes > 1 else "one process"


def build_engine(name: Name, run: RunConfig, policy: Policy, accelerator: Accelerator, comm: Comm) -> Engine:
    """The engine that holds a policy; see :func:`loaded_on` for where its weights are until then.

    Raises:
        ModelError: the model cannot checkpoint gradients and is to, or has weights that fsdp2 cannot reduce.
    """
    checkpointing, settings = run.optimisation.gradient_checkpointing, run.engine
    if name != "fsdp2":
        if checkpointing:
            policy.checkpoint_gradients()
        return Ddp(policy, accelerator.num_processes) if name == "ddp" else OneProcess(policy)
    device = accelerator.device
    if not dist.is_initialized():  # one process, and shards for the sake of offload
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]  # not on Windows
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return Fsdp2(
        policy,
        device=device,
        gather=torch.bfloat16 if settings.gather == "bf16" else None,
        offload=settings.offload,
        checkpointing=checkpointing,
        comm=comm,
        processes=accelerator.num_processes,
    )


def loaded_on(name: Name, accelerator: Accelerator) -> torch.device:
    """Where weights are put when they are read: what is sharded need not fit on a device whole."""
    return torch.device("cpu") if name == "fsdp2" else accelerator.device


def _true(environment: Mapping[str, str], variable: str) -> bool:
    return environment.get(variable, "").lower() in ("true", "1", "yes", "y", "t", "on")
