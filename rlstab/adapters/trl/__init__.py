"""An objective inside TRL's ``GRPOTrainer``, and a callback that only watches."""

from __future__ import annotations

from rlstab.errors import MissingPackage

try:
    import trl as _trl  # noqa: F401  # whether it is there
except ImportError as error:
    raise MissingPackage(
        "rlstab.adapters.trl needs the package trl, which is not installed. Run: pip install 'rlstab[trl]'"
    ) from error

from rlstab.adapters.trl.release import check_release as check_host
from rlstab.adapters.trl.trainer import RLStabGRPOTrainer
from rlstab.adapters.trl.watching import WatchCallback

__all__ = ["RLStabGRPOTrainer", "WatchCallback", "check_host"]
