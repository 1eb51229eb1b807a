"""What a launcher asks for: taken, or refused by name; never ignored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType

from rlstab.config import load_run
from rlstab.config.runs import EngineSettings
from rlstab.errors import ConfigError
from rlstab.train.engines import engine_name, require_launcher

#: What ``accelerate launch --use_fsdp --fsdp_version 2`` sets, and what it sets where it is asked for nothing.
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "false"}
NOTHING = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
NOTHING |= {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_USE_CPU": "True"}


def named(engine: str, processes: int, kind: str = "MULTI_CPU", **environment: str) -> str:
    found: Any = SimpleNamespace(num_processes=processes, distributed_type=DistributedType(kind))
    return engine_name(EngineSettings(name=engine), found, environment)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "processes", "launcher", "name"),
    [
        ("auto", 1, {}, "one process"),
        ("auto", 2, {}, "ddp"),
        ("ddp", 1, {}, "one process"),
        ("ddp", 3, {}, "ddp"),
        ("fsdp2", 1, {}, "fsdp2"),
        ("fsdp2", 2, {}, "fsdp2"),
        ("auto", 2, FSDP, "fsdp2"),
        ("auto", 2, {"ACCELERATE_USE_FSDP": "false"}, "ddp"),
    ],
)
def test_which_engine_a_run_gets(engine: str, processes: int, launcher: dict[str, str], name: str) -> None:
    assert named(engine, processes, "NO" if processes == 1 else "MULTI_CPU", **launcher) == name


@pytest.mark.parametrize("kind", ["MULTI_XPU", "XLA", "DEEPSPEED", "MEGATRON_LM", "MULTI_NPU"])
def test_processes_of_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"^accelerate finds processes of the type {kind}; rlstab runs on CPUs and"):
        named("auto", 2, kind)


@pytest.mark.parametrize("launcher", [{}, NOTHING, {**NOTHING, **FSDP}])
def test_what_is_taken(launcher: dict[str, str]) -> None:
    require_launcher(launcher, load_run({"objective": "s2t"}))


@pytest.mark.parametrize(
    ("launcher", "text"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "the launcher asks for DeepSpeed (ACCELERATE_USE_DEEPSPEED), which"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "the launcher asks for Megatron-LM (ACCELERATE_USE_MEGATRON_LM)"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "tensor, context or sequence parallelism"),
        (
            {"ACCELERATE_USE_FSDP": "true"},
            "FSDP version 1, and rlstab shards by version 2. Launch with --fsdp_version 2",
        ),
        (
            {**FSDP, "FSDP_OFFLOAD_PARAMS": "true"},
            "engine.offload is false. Set engine to {name: fsdp2, offload",
        ),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "Set optimisation.gradient_checkpointing to true"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "optimisation.precision is fp32. Set that, which has"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "the launcher asks for mixed precision fp8"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "asks for INDUCTOR (ACCELERATE_DYNAMO_BACKEND)"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "optimisation.micro_batch_size is what bounds the memory"),
    ],
)
def test_what_is_refused_by_name(launcher: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_launcher({**NOTHING, **launcher}, load_run({"objective": "s2t"}))
    assert text in str(refused.value)


def test_a_launcher_and_a_file_that_disagree() -> None:
    run = load_run({"objective": "s2t", "engine": "ddp"})
    with pytest.raises(ConfigError, match=r"^the launcher asks for FSDP \(ACCELERATE_USE_FSDP\), and engine is ddp\."):
        require_launcher(FSDP, run)
    require_launcher(
        {**FSDP, "FSDP_OFFLOAD_PARAMS": "true", "ACCELERATE_MIXED_PRECISION": "bf16"},
        load_run(
            {
                "objective": "s2t",
                "engine": {"name": "fsdp2", "offload": True},
                "optimisation": {"precision": "bf16"},
            }
        ),
    )
