"""Settings of each stage at which it has something to do on the rollouts of the laws; each stage has some."""

from __future__ import annotations

from collections.abc import Mapping

from rlstab.stages.blockwise import Blockwise
from rlstab.stages.bnpo import BNPO
from rlstab.stages.deep_grpo import DeepGRPO
from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.dynamic_sampling import DynamicSampling
from rlstab.stages.goldilocks import Goldilocks
from rlstab.stages.goldilocks_teacher import GoldilocksTeacher
from rlstab.stages.grpo import GRPO
from rlstab.stages.in_order import InOrder
from rlstab.stages.laconic import Laconic
from rlstab.stages.max_rl import MaxRL
from rlstab.stages.opo import OPO
from rlstab.stages.opob import OPOB
from rlstab.stages.opob_proxy import OPOBProxy
from rlstab.stages.overlong import Overlong
from rlstab.stages.paced import Paced
from rlstab.stages.reinforce_pp import ReinforcePP
from rlstab.stages.rloo import RLOO
from rlstab.stages.stage import Stage
from rlstab.stages.uniform import Uniform

STAGE_EXAMPLES: Mapping[str, tuple[Stage, ...]] = {
    "blockwise": (Blockwise(), Blockwise(shrink=2.0)),
    "bnpo": (BNPO(), BNPO(low=-1.0, high=2.0)),
    "deep_grpo": (
        DeepGRPO(),
        DeepGRPO(branches=3, gamma=0.5, threshold=0.5, groups="failed", max_parents=1, window=4, warmup=0),
    ),
    "dr_grpo": (DrGRPO(),),
    "dynamic_sampling": (DynamicSampling(), DynamicSampling(max_refills=0), DynamicSampling(rewards="raw")),
    "goldilocks": (Goldilocks(pool=24), Goldilocks(pool=9, discount=1.0, random_share=0.0)),
    "goldilocks_teacher": (
        GoldilocksTeacher(pool=24, candidates=3, window=8),
        GoldilocksTeacher(candidates=2, random_share=0.0),
    ),
    "grpo": (GRPO(), GRPO(std=False), GRPO(epsilon=1e-6, ddof=0)),
    "in_order": (InOrder(), InOrder(shuffle=False)),
    "laconic": (Laconic(budget=6.0), Laconic(budget=4.0, step=0.1, floor=0.05, ceiling=0.5, most=0.2)),
    "max_rl": (MaxRL(),),
    "opo": (OPO(),),
    "opob": (OPOB(), OPOB(norm_by_std=False)),
    "opob_proxy": (OPOBProxy(), OPOBProxy(norm_by_std=False)),
    "overlong": (Overlong(buffer=4), Overlong(buffer=12, penalty=0.5)),
    "paced": (Paced(pool=24), Paced(pool=9, target=0.25, discount=0.0)),
    "reinforce_pp": (ReinforcePP(), ReinforcePP(baseline=True)),
    "rloo": (RLOO(),),
    "uniform": (Uniform(), Uniform(pool=9)),
}
