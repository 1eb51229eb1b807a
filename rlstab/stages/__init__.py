"""What acts outside the loss, one stage per file; each is imported only when it is asked for."""

from __future__ import annotations

from rlstab.core.registry import Registry
from rlstab.stages.stage import Stage

#: The static table of what ships. A stage missing here does not exist for YAML.
STAGES: Registry[Stage] = Registry(
    {
        "dr_grpo": "rlstab.stages.dr_grpo:DrGRPO",
        "grpo": "rlstab.stages.grpo:GRPO",
        "in_order": "rlstab.stages.in_order:InOrder",
        "laconic": "rlstab.stages.laconic:Laconic",
        "overlong": "rlstab.stages.overlong:Overlong",
        "rloo": "rlstab.stages.rloo:RLOO",
    },
    "rlstab.stages",
    Stage,
    "stage",
)
