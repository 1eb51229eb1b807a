"""An objective inside verl's actor, selected by one setting of verl's configuration; users import nothing from here.

The setting is ``actor_rollout_ref.actor.policy_loss.loss_mode=rlstab:FILE``. verl itself imports
:mod:`rlstab.adapters.verl.plugin`.
"""

from rlstab.extras import require

require("verl", "rlstab.adapters.verl")

__all__ = ["check_host"]


def check_host() -> None:
    """Refuse a verl that the adapter does not support, or that does not load the adapter.

    Raises:
        HostError: verl has another release or patched methods, or the entry point is missing, disabled or broken.
    """
    from rlstab.adapters.releases import check_release
    from rlstab.adapters.verl.plugin_check import check_plugin

    check_release("verl")
    check_plugin()
