"""Stages, which act outside the loss, one per file; each is imported only when it is used."""

from rlstab.core.registry import Registry
from rlstab.stages.stage import Stage

#: The table of shipped stages. YAML does not know a stage that is missing here.
STAGES: Registry[Stage] = Registry(
    {
        "blockwise": "rlstab.stages.blockwise:Blockwise",
        "bnpo": "rlstab.stages.bnpo:BNPO",
        "deep_grpo": "rlstab.stages.deep_grpo:DeepGRPO",
        "dr_grpo": "rlstab.stages.dr_grpo:DrGRPO",
        "dynamic_sampling": "rlstab.stages.dynamic_sampling:DynamicSampling",
        "gdpo": "rlstab.stages.gdpo:GDPO",
        "gigpo": "rlstab.stages.gigpo:GiGPO",
        "goldilocks": "rlstab.stages.goldilocks:Goldilocks",
        "goldilocks_teacher": "rlstab.stages.goldilocks_teacher:GoldilocksTeacher",
        "grpo": "rlstab.stages.grpo:GRPO",
        "in_order": "rlstab.stages.in_order:InOrder",
        "laconic": "rlstab.stages.laconic:Laconic",
        "max_rl": "rlstab.stages.max_rl:MaxRL",
        "opo": "rlstab.stages.opo:OPO",
        "opob": "rlstab.stages.opob:OPOB",
        "opob_proxy": "rlstab.stages.opob_proxy:OPOBProxy",
        "optimal_token_baseline": "rlstab.stages.optimal_token_baseline:OptimalTokenBaseline",
        "overlong": "rlstab.stages.overlong:Overlong",
        "paced": "rlstab.stages.paced:Paced",
        "reinforce_pp": "rlstab.stages.reinforce_pp:ReinforcePP",
        "rloo": "rlstab.stages.rloo:RLOO",
        "uniform": "rlstab.stages.uniform:Uniform",
    },
    "rlstab.stages",
    Stage,
    "stage",
)
