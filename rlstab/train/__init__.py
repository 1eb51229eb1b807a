"""A minimal GRPO-family trainer on accelerate.

``loop`` asks ``generate`` for a :class:`~rlstab.train.rollout.Rollout` (prompts, sampling, rewards, stages).
``learn`` then estimates its advantages and makes the optimizer steps, through an ``engine`` that holds the policy;
``reference_and_teacher`` has the reference and the teacher.
``checkpoint`` and ``run_folder`` write what a run leaves, ``tracking`` its metrics, and ``evaluate`` measures it.

Needs the extra ``train``; without it the import raises :class:`rlstab.errors.MissingPackage`.
"""

from rlstab.extras import require

require("train", "Training")  # all at once, and before anything starts

from rlstab.train.loop import RunResult, Stopped, train  # noqa: E402  # see above
from rlstab.train.rollout import Rollout  # noqa: E402  # see above

__all__ = ["Rollout", "RunResult", "Stopped", "train"]
