"""An objective inside TRL's ``GRPOTrainer``, and a callback that dumps the tokens of its steps."""

from rlstab.extras import require

require("trl", "rlstab.adapters.trl")

from rlstab.adapters.host_objective import deviations_of, objective_of  # noqa: E402  # after the check
from rlstab.adapters.trl.dump import DumpCallback  # noqa: E402  # after the check
from rlstab.adapters.trl.release import check_release as check_host  # noqa: E402  # after the check
from rlstab.adapters.trl.trainer import RLStabGRPOTrainer  # noqa: E402  # after the check

__all__ = ["DumpCallback", "RLStabGRPOTrainer", "check_host", "deviations_of", "objective_of"]
