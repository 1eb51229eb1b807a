"""What ``run.json`` says of a run beside its id."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator

import rlstab
from rlstab.config.objectives import objective_hash
from rlstab.config.runs import RunConfig, run_hash
from rlstab.config.user_code import checksums
from rlstab.tasks.rewards import Rewards


def about(
    run: RunConfig,
    accelerator: Accelerator,
    processes: int,
    providers: Mapping[str, Any],
    rewards: Rewards,
    engine: str,
) -> dict[str, Any]:
    """Versions, the machine, and what took part, as it counted itself.

    Args:
        run: its settings.
        accelerator: of this process.
        processes: that answered.
        providers: names of functions of the user's own.
        rewards: that are measured.
        engine: in words.
    """
    return {
        "run_hash": run_hash(run),
        "objective_hash": objective_hash(run.composition),
        "command": " ".join(sys.argv),
        "rlstab": rlstab.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "device": str(accelerator.device),
        "processes": processes,
        "engine": engine,
        "threads": torch.get_num_threads(),
        "providers": providers,
        "rewards": rewards.in_words(),
        "code": checksums(run.model_dump(mode="json")),
    }
