"""An objective inside verl's actor. Nothing is imported from here: one setting of verl's configuration selects it.

It is ``actor_rollout_ref.actor.policy_loss.loss_mode=rlstab:FILE``. :mod:`rlstab.adapters.verl.plugin` is imported by
verl itself.
"""

from __future__ import annotations

from rlstab.extras import require

require("verl", "rlstab.adapters.verl")

__all__ = ["check_host", "tested"]


def check_host() -> None:
    """Refuse a verl that the adapter does not know, or one that does not load it.

    Raises:
        HostError: another release, methods that were replaced or changed, or an entry point that is missing, switched
            off or broken.
    """
    from rlstab.adapters.verl.entry_points import check_plugin
    from rlstab.adapters.verl.release import check_release

    check_release()
    check_plugin()


def tested() -> str:
    """The release that the tests have."""
    from rlstab.adapters.verl.release import RELEASE

    return f"verl {RELEASE}"
