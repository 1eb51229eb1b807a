"""How far the policies of a run can have moved from each other, and so which methods can act in it.

Three policies: the one that sampled (``rollout_logprobs``), the one that the ratio divides by (``old_logprobs``), and
the one at the start of the optimizer step (``logprobs``). A method says which it compares; unset settings follow.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Literal, Protocol, TypeAlias

OldLogprobs: TypeAlias = Literal["live", "rollout", "recompute"]
Refresh: TypeAlias = Literal["rollout", "step"]


class Schedule(Protocol):
    """What decides it: the settings of the optimisation, with nothing left open."""

    @property
    def old_logprobs(self) -> OldLogprobs | None: ...

    @property
    def refresh(self) -> Refresh | None: ...

    @property
    def optimizer_steps_per_rollout(self) -> int: ...


def old_logprobs_for(drift: Set[str], optimizer_steps_per_rollout: int, *, off_policy: bool = False) -> OldLogprobs:
    """What the ratio divides by where nobody says: the cheapest with which every method acts that can.

    Args:
        drift: what the methods that act compare.
        optimizer_steps_per_rollout: of the run.
        off_policy: the sampler is another policy by intention, stale or rounded; then the ratio is to it.
    """
    if drift & {"sampler", "start"}:
        return "recompute"  # else old_logprobs are the sampler's own, and nothing is between them
    if off_policy:
        return "rollout"
    return "live" if optimizer_steps_per_rollout == 1 else "recompute"


def refresh_for(drift: Set[str], optimizer_steps_per_rollout: int) -> Refresh:
    """Of which policy the evidence is where nobody says."""
    return "step" if drift & {"step", "start"} and optimizer_steps_per_rollout > 1 else "rollout"


def why_idle(drift: str, schedule: Schedule) -> str | None:
    """Why two policies that a method compares are one in a run, with the cure; None where they can differ.

    Args:
        drift: one of :data:`rlstab.core.validate.DRIFT`.
        schedule: settings that leave nothing open.
    """
    one_step, old = schedule.optimizer_steps_per_rollout == 1, schedule.old_logprobs
    if drift == "live":
        ratio = {"live": "the ratio is exactly 1", "recompute": "the ratio is 1 up to rounding"}.get(str(old))
        if one_step and ratio:
            return (
                f"with one optimizer step per rollout {ratio}. It matters with epochs or mini_batches above 1, or with "
                f"old_logprobs: rollout."
            )
    elif drift == "step":
        if schedule.refresh == "rollout":
            return "the evidence is that of old_logprobs itself. Set refresh: step."
        if one_step and old != "rollout":
            return "with one optimizer step per rollout the policy has not moved. It matters with more."
    elif drift == "sampler" and old != "recompute":
        return f"old_logprobs: {old} compares the sampler with itself. Set old_logprobs: recompute."
    elif drift == "start" and old != "recompute" and schedule.refresh == "rollout":
        return f"old_logprobs: {old} with refresh: rollout compares the sampler with itself. Change either of them."
    return None
