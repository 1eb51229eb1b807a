"""Stacks of methods that act at different places: prompts, rollouts, tokens and, with stale responses, the baseline."""

from collections.abc import Mapping

from rlstab.core.compose import compose
from rlstab.presets.off_policy import VCPO_SOURCES
from rlstab.presets.recipe import Preset, clip
from rlstab.presets.token_recipes import S2T_SOURCES
from rlstab.stages.deep_grpo import DeepGRPO
from rlstab.stages.goldilocks import Goldilocks
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.ess_scale import ESSScale
from rlstab.zoo.importance_correction import ImportanceCorrection
from rlstab.zoo.s2t import S2TMask
from rlstab.zoo.stream_weight import StreamWeight
from rlstab.zoo.token_mean import TokenMean

_DEEP = "AgentCombo/DEEP-GRPO, its configuration"
_SOURCES: Mapping[str, str] = {
    **clip("arXiv 2503.14476: 0.2", "arXiv 2503.14476: 0.28"),
    **S2T_SOURCES,
    "stream_weight.coefficient": "arXiv 2602.14169: the loss of the branches has weight 1",
    "goldilocks.pool": "own choice",
    "goldilocks.discount": "thu-rllab/MoPPS, on Countdown: 0.5",
    "goldilocks.random_share": "own choice: the value of arXiv 2602.14868 was not found",
    "deep_grpo.branches": "arXiv 2602.14169: 8",
    "deep_grpo.gamma": f"{_DEEP}: 2.0",
    "deep_grpo.threshold": f"{_DEEP}: 0",
    "deep_grpo.groups": f"{_DEEP}: every failed answer",
    "deep_grpo.max_parents": f"{_DEEP}: no limit",
    "deep_grpo.window": f"{_DEEP}: 10000",
    "deep_grpo.warmup": f"{_DEEP}: 10",
}

STACKS: Mapping[str, Preset] = {
    "stack": Preset(
        compose(ClipHigher(low=0.2, high=0.28), S2TMask(), StreamWeight(), TokenMean()),
        "grpo",
        "One method at each point: Goldilocks' prompts, DEEP-GRPO's branches, clip-higher, S2T's mask.",
        _SOURCES,
        stages=(Goldilocks(pool=256), DeepGRPO()),
    ),
    "stack_stale": Preset(
        compose(
            ClipHigher(low=0.2, high=0.28),
            S2TMask(),
            ImportanceCorrection(level="sequence", max_weight=8.0),
            ESSScale(base=1.0, power=0.5, anchor="rollout"),
            StreamWeight(),
            TokenMean(),
        ),
        "opob",
        "The stack for stale responses: with VCPO's weights, step size and baseline.",
        {**_SOURCES, **VCPO_SOURCES},
        stages=(Goldilocks(pool=256), DeepGRPO()),
    ),
}
