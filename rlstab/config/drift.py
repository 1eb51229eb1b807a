"""With which settings the two policies that a method compares can differ in a run, and why not otherwise.

The pairs of policies are those of :data:`rlstab.core.validate.DRIFT`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlstab.config.settings import OptimisationSettings

#: For each pair the settings with which the two policies can differ, where a run leaves these settings open.
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "live": {},
    "step": {"refresh": "step"},
    "sampler": {"old_logprobs": "recompute"},
    "start": {"old_logprobs": "recompute", "refresh": "step"},
}


def why_idle(drift: str, optimisation: OptimisationSettings) -> str | None:
    """Why the two policies that a method compares are the same in a run, with the cure; None if they can differ.

    Args:
        drift: one of :data:`rlstab.core.validate.DRIFT`.
        optimisation: resolved settings.
    """
    recomputed, fresh = optimisation.old_logprobs == "recompute", optimisation.refresh == "step"
    moves = optimisation.optimizer_steps_per_rollout > 1 or optimisation.old_logprobs == "rollout"
    differ, reason = {
        "live": (moves, "the ratio is 1 with one optimizer step per rollout. Set epochs, or old_logprobs: rollout."),
        "step": (fresh and moves, "it compares old_logprobs with itself. Set refresh: step, and epochs above 1."),
        "sampler": (recomputed, "it compares the sampler with itself. Set old_logprobs: recompute."),
        "start": (recomputed or fresh, "it compares the sampler with itself. Set refresh: step."),
    }[drift]
    return None if differ else reason


def settings_for(drifts: Iterable[str], several_steps: bool) -> dict[str, str]:
    """The cheapest settings with which these policies can differ.

    Args:
        drifts: names in :data:`rlstab.core.validate.DRIFT`.
        several_steps: whether a rollout makes several optimizer steps; with one, a refresh at each step changes
            nothing.
    """
    settings = {name: value for drift in drifts for name, value in _SETTINGS[drift].items()}
    return settings if several_steps else {name: value for name, value in settings.items() if name != "refresh"}
