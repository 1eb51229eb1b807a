"""What acts outside the loss, one stage per file; each is imported only when it is asked for."""

from __future__ import annotations

from rlstab.core.registry import Registry
from rlstab.stages.stage import Stage

#: The static table of what ships. A stage missing here does not exist for YAML.
STAGES: Registry[Stage] = Registry(
    {
        "deep_grpo": "rlstab.stages.deep_grpo:DeepGRPO",
        "dr_grpo": "rlstab.stages.dr_grpo:DrGRPO",
        "dynamic_sampling": "rlstab.stages.dynamic_sampling:DynamicSampling",
        "grpo": "rlstab.stages.grpo:GRPO",
        "in_order": "rlstab.stages.in_order:InOrder",
        "rloo": "rlstab.stages.rloo:RLOO",
    },
    "rlstab.stages",
    Stage,
    "stage",
)
