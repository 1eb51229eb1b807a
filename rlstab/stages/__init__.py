"""What acts outside the loss, one stage per file; each is imported only when it is asked for."""

from __future__ import annotations

from rlstab.core.registry import Registry
from rlstab.stages.stage import Stage

#: The static table of what ships. A stage missing here does not exist for YAML.
STAGES: Registry[Stage] = Registry(
    {
        "dr_grpo": "rlstab.stages.dr_grpo:DrGRPO",
        "goldilocks": "rlstab.stages.goldilocks:Goldilocks",
        "goldilocks_teacher": "rlstab.stages.goldilocks_teacher:GoldilocksTeacher",
        "grpo": "rlstab.stages.grpo:GRPO",
        "in_order": "rlstab.stages.in_order:InOrder",
        "paced": "rlstab.stages.paced:Paced",
        "rloo": "rlstab.stages.rloo:RLOO",
        "uniform": "rlstab.stages.uniform:Uniform",
    },
    "rlstab.stages",
    Stage,
    "stage",
)
