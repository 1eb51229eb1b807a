"""A minimal GRPO-family trainer on accelerate: rollout, step, loop, checkpoint, tracking.

Needs the extra ``train``; without it the import raises :class:`rlstab.errors.MissingPackage`.
"""

from rlstab.extras import require

require("train", "Training")  # all that is missing at once

from rlstab.train.loop import RunResult, train  # noqa: E402
from rlstab.train.providers import Responses  # noqa: E402
from rlstab.train.stopping import Stopped  # noqa: E402

__all__ = ["Responses", "RunResult", "Stopped", "train"]
