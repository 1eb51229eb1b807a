"""The one key of verl's configuration that selects the adapter: ``policy_loss.loss_mode=rlstab:FILE``."""

from typing import Any

#: The value begins with this, followed by the path of the objective.
PREFIX = "rlstab:"


def objective_file(config: Any) -> str | None:
    """The path after ``rlstab:`` in the configuration ``actor_rollout_ref``; None in a run without the adapter."""
    mode = str(config.actor.policy_loss.get("loss_mode", ""))
    return mode.removeprefix(PREFIX).strip() if mode.startswith(PREFIX) else None
