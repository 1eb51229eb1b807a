"""The laws that every method must obey, public so that you can check your own methods.

``print(check_objective(MyMethod()))`` is a readable report; ``parametrize_laws`` is the same under pytest.
``check_stage`` is the same for a stage, which ``parametrize_laws`` takes, too. ``assert_cut_free`` takes any loss
function, written with rlstab or not.
"""

from rlstab.testing.agreement import BrokenLaw
from rlstab.testing.check import Report, Result, check_objective, check_stage, parametrize_laws
from rlstab.testing.cut_free import CutResult, assert_cut_free, check_cut_free, skyrl_loss, trl_loss, verl_loss
from rlstab.testing.laws import LAWS, Law
from rlstab.testing.stage_laws import STAGE_LAWS

__all__ = [
    "LAWS",
    "STAGE_LAWS",
    "BrokenLaw",
    "CutResult",
    "Law",
    "Report",
    "Result",
    "assert_cut_free",
    "check_cut_free",
    "check_objective",
    "check_stage",
    "parametrize_laws",
    "skyrl_loss",
    "trl_loss",
    "verl_loss",
]
