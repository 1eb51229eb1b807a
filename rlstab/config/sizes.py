"""Numbers of a run that no machine can hold, found before anything is loaded."""

from __future__ import annotations

from rlstab.config.runs import RunConfig
from rlstab.errors import ConfigError

#: Responses of one rollout, or of one evaluation. Their texts, ids and rewards are lists and tensors in memory.
MOST_RESPONSES = 10_000_000


def require_sizes(run: RunConfig) -> None:
    """Refuse what would end in a MemoryError, or fill the memory until the system ends something.

    Raises:
        ConfigError: a rollout or an evaluation has more responses than MOST_RESPONSES.
    """
    pairs = {"rollout": ("group", run.rollout.prompts, run.rollout.group)}
    if run.evaluation.every:
        pairs["evaluation"] = ("samples", run.evaluation.prompts, run.evaluation.samples)
    for part, (name, prompts, each) in pairs.items():
        if prompts * each > MOST_RESPONSES:
            raise ConfigError(
                f"{part}.prompts x {part}.{name} = {prompts} x {each} responses at once; at most {MOST_RESPONSES} are "
                f"allowed. Lower one of them."
            )
