"""Whether the installed verl is the supported release, and none of the methods that the adapter uses is patched."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import verl
from packaging.version import Version
from verl.utils.metric import Metric
from verl.workers import engine_workers
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead
from verl.workers.utils import losses, padding

from rlstab.adapters.releases import check_methods
from rlstab.errors import HostError

#: The release that the adapter was written for; verl changes its workers between releases.
RELEASE = "0.9.1"
_CURE = f"Install the release that the adapter was tested with: pip install 'verl=={RELEASE}'"
#: Methods that the adapter overrides, calls or relies on line by line: the names of the first parameters, and, where
#: the body matters, the checksum of its syntax in the tested release.
METHODS: tuple[tuple[Any, Mapping[str, tuple[str, str]]], ...] = (
    (
        engine_workers.TrainingWorker,
        {
            "__init__": ("self config", ""),
            "set_loss_fn": ("self loss_fn", ""),
            "train_mini_batch": ("self data", "36c34960f699"),
            "train_batch": ("self data", "7a7c48a7b5df"),
            "save_checkpoint": ("self local_path hdfs_path global_step max_ckpt_to_keep", ""),
            "load_checkpoint": ("self local_path hdfs_path del_local_after_load", ""),
        },
    ),
    (engine_workers.ActorRolloutRefWorker, {"init_model": ("self", ""), "update_actor": ("self data", "")}),
    (
        FSDPEngine,
        {
            "train_batch": ("self data loss_function", ""),
            "infer_batch": ("self data loss_function", ""),
            "forward_backward_batch": ("self data loss_function forward_only", "19ab51904038"),
            "optimizer_step": ("self", "e4e5d17b2c31"),
            "optimizer_zero_grad": ("self", ""),
            "get_data_parallel_group": ("self", ""),
        },
    ),
    (
        FSDPEngineWithLMHead,
        {
            "forward_step": ("self micro_batch loss_function forward_only", "b5831bfdc49f"),
            "prepare_model_outputs": ("self output output_args micro_batch logits_processor_func", "eb2f78a46bea"),
        },
    ),
    (losses, {"ppo_loss": ("config model_output data dp_group", "780e97b7b4db")}),
    (padding, {"no_padding_2_padding": ("tensor data", "")}),
    (Metric, {"__init__": ("self aggregation value", ""), "aggregate_dp": ("metric_lists", "")}),
)


def check_release(version: str = verl.__version__) -> None:
    """Refuse a verl that the adapter does not support.

    Raises:
        HostError: verl has another release, or a method was replaced or has other parameters.
    """
    if Version(version).release != Version(RELEASE).release:
        raise HostError(f"verl {version} is installed, and the adapter knows {RELEASE} alone. {_CURE}")
    changed = [
        name
        for owner, methods in METHODS
        for name in check_methods(owner, methods, release=f"verl {version}", homes=("verl.",), cure=_CURE)
    ]
    if changed:
        where = inspect.getsourcefile(engine_workers)
        warnings.warn(
            f"this verl {version} ({where}) has another {', '.join(changed)} than the release that the adapter was "
            f"tested with. What is new there may be missing here. Compare one update with verl's own loss.",
            stacklevel=3,
        )
