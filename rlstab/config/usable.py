"""Settings that are valid each for itself and cannot make a run, found before anything is loaded."""

from __future__ import annotations

from rlstab.config.runs import RunConfig
from rlstab.errors import ConfigError

#: Responses of one rollout, or of one evaluation. Their texts, ids and rewards are lists and tensors in memory.
MOST_RESPONSES = 10_000_000


def require_usable(run: RunConfig) -> None:
    """Refuse what would fill the memory until the system ends something, and responses that cannot begin.

    Raises:
        ConfigError: a rollout or an evaluation has more responses than MOST_RESPONSES, or the stop text is empty.
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
    if run.rollout.stop == "":
        raise ConfigError(
            "rollout.stop: an empty text is in every response, so each would end after its first token. Write null for "
            "no stop text."
        )
