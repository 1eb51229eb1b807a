"""A minimal GRPO-family trainer on accelerate: rollout, step, loop, checkpoint, tracking."""

from rlstab.train.loop import RunResult, train
from rlstab.train.providers import Responses
from rlstab.train.stopping import Stopped

__all__ = ["Responses", "RunResult", "Stopped", "train"]
