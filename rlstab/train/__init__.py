"""A minimal GRPO-family trainer on accelerate: rollout, step, loop, checkpoint, tracking."""

from rlstab.train.loop import RunResult, train

__all__ = ["RunResult", "train"]
