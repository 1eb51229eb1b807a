"""The laws that every method must obey, public so that you can check your own methods.

``print(check_objective(MyMethod()))`` is a readable report; ``parametrize_laws`` is the same under pytest.
``check_objective(MyMethod(), processes=2)`` runs ranks as real processes, for what threads share and processes do not.
``check_stage`` and ``parametrize_stage_laws`` are the same for a stage.
Needs the extra ``testing`` (hypothesis, and pytest for the helper).
"""

from rlstab.testing.agreement import BrokenLaw
from rlstab.testing.laws import LAWS, Law
from rlstab.testing.objective_check import Report, Result, check_objective, parametrize_laws
from rlstab.testing.rank_processes import Processes
from rlstab.testing.stage_check import check_stage, parametrize_stage_laws
from rlstab.testing.stage_laws import STAGE_LAWS, StageLaw
from rlstab.testing.stage_steps import Rollout, rollouts
from rlstab.testing.steps import Step, steps

__all__ = [
    "LAWS",
    "STAGE_LAWS",
    "BrokenLaw",
    "Law",
    "Processes",
    "Report",
    "Result",
    "Rollout",
    "StageLaw",
    "Step",
    "check_objective",
    "check_stage",
    "parametrize_laws",
    "parametrize_stage_laws",
    "rollouts",
    "steps",
]
