"""A minimal GRPO-family trainer on accelerate: rollout, step, loop, checkpoint, tracking."""

from rlstab.train.loop import RunResult, train
from rlstab.train.providers import Responses

__all__ = ["Responses", "RunResult", "train"]
