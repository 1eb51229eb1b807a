"""A minimal GRPO-family trainer on accelerate: tasks, rollout, step, loop, checkpoint, tracking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlstab.train.loop import train
    from rlstab.train.providers import Responses

__all__ = ["Responses", "train"]


def __getattr__(name: str) -> Any:
    # transformers and accelerate are loaded by whoever trains, not by whoever imports a task
    if name == "train":
        from rlstab.train.loop import train

        return train
    if name == "Responses":
        from rlstab.train.providers import Responses

        return Responses
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
