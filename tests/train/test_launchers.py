"""What a launcher asks for: taken, or refused by name; never ignored."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.commands import launch
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

from rlstab.config import load_run
from rlstab.config.settings import EngineSettings
from rlstab.errors import ConfigError
from rlstab.train import processes
from rlstab.train.engines import engine_name, require_launcher
from rlstab.train.processes import meet

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


def launched(*options: str) -> dict[str, str]:
    """What ``accelerate launch`` tells the processes that it starts, by its own code."""
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a port that is in use
        for name in [one for one in os.environ if one.startswith(("ACCELERATE_", "FSDP_"))]:
            patched.delenv(name)
        patched.setattr(launch, "default_config_file", os.devnull)
        given, *_ = launch._validate_launch_command(
            launch.launch_command_parser().parse_args(["--num_processes", "2", *options, "script.py"])
        )
        told = prepare_multi_gpu_env(given)
    return {name: value for name, value in told.items() if name.startswith(("ACCELERATE_", "FSDP_", "MEGATRON_"))}


SHARDED = ("--use_fsdp", "--fsdp_version", "2")


@pytest.mark.parametrize("options", [("--multi_gpu",), SHARDED])
def test_what_the_launcher_says_of_itself_is_taken(options: tuple[str, ...]) -> None:
    told = launched(*options)
    require_launcher(told, load_run({"objective": "s2t"}))
    assert named("auto", 2, **told) == ("fsdp2" if options == SHARDED else "ddp")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--use_megatron_lm",), "the launcher asks for Megatron-LM (ACCELERATE_USE_MEGATRON_LM)"),
        (
            (*SHARDED, "--use_parallelism_config", "--parallelism_config_tp_size", "2"),
            "tensor, context or sequence parallelism",
        ),
        (
            (*SHARDED, "--use_parallelism_config", "--parallelism_config_cp_size", "2"),
            "tensor, context or sequence parallelism",
        ),
        (("--use_fsdp",), "FSDP version 1, and rlstab shards by version 2. Launch with --fsdp_version 2"),
        ((*SHARDED, "--fsdp_offload_params", "true"), "engine.offload is false. Set engine to {name: fsdp2, offload"),
        (
            (*SHARDED, "--fsdp_activation_checkpointing", "true"),
            "Set optimisation.gradient_checkpointing to true",
        ),
        (
            (*SHARDED, "--fsdp_activation_checkpointing_offload", "true"),
            "asks for true (FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD)",
        ),
        ((*SHARDED, "--fsdp_reshard_after_forward", "false"), "asks for false (FSDP_RESHARD_AFTER_FORWARD)"),
        ((*SHARDED, "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"), "asks for SIZE_BASED_WRAP (FSDP_AUTO_WRAP_POLICY)"),
        ((*SHARDED, "--fsdp_transformer_layer_cls_to_wrap", "Block"), "asks for Block (FSDP_TRANSFORMER_CLS_TO_WRAP)"),
        (("--multi_gpu", "--mixed_precision", "bf16"), "optimisation.precision is fp32. Set that, which has"),
        (("--multi_gpu", "--mixed_precision", "fp16"), "the launcher asks for mixed precision fp16"),
        (("--multi_gpu", "--dynamo_backend", "inductor"), "asks for INDUCTOR (ACCELERATE_DYNAMO_BACKEND)"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else "",
)
def test_options_of_accelerate_launch_are_refused_by_name(options: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_launcher(launched(*options), load_run({"objective": "s2t"}))
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("launcher", "text"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "the launcher asks for DeepSpeed (ACCELERATE_USE_DEEPSPEED), which"),
        ({**FSDP, "FSDP_IGNORED_MODULES": "head"}, "asks for head (FSDP_IGNORED_MODULES), which rlstab does not do"),
        ({"ACCELERATE_USE_SAGEMAKER": "true"}, "SageMaker's data parallelism (ACCELERATE_USE_SAGEMAKER)"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "the launcher asks for mixed precision fp8"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "optimisation.micro_batch_size is what bounds the memory"),
    ],
)
def test_what_else_is_refused_by_name(launcher: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_launcher({**NOTHING, **launcher}, load_run({"objective": "s2t"}))
    assert text in str(refused.value)


def test_every_process_reads_the_weights_whatever_the_launcher_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else some versions of transformers read them in the first process, and expect its caller to send them."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    monkeypatch.setattr(processes, "Accelerator", lambda **options: None)
    meet(tmp_path, [])
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"].lower() == "false"


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
