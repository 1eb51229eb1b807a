"""Recipes for a policy that has left the one that sampled: staleness, or a sampler that is not the trainer."""

from collections.abc import Mapping

from rlstab.core.compose import compose
from rlstab.presets.recipe import Preset, clip, script
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.constant_length import ConstantLength
from rlstab.zoo.cppo import CPPO
from rlstab.zoo.dppo import DPPO
from rlstab.zoo.drpo import DRPO
from rlstab.zoo.ess_scale import ESSScale
from rlstab.zoo.importance_correction import ImportanceCorrection
from rlstab.zoo.m2po import M2PO
from rlstab.zoo.sequence_mean import SequenceMean
from rlstab.zoo.token_mean import TokenMean
from rlstab.zoo.vespo import VESPO

_CPPO = "Tencent-Hunyuan/UniRL CPPO/config.yaml"
_DPPO = "verl-project/verl examples/dppo_trainer/run_qwen30b_dppo.sh (commit 8f11888), by the authors"
_DRPO = "Tencent-Hunyuan/UniRL DRPO/config.yaml"
_TIS = "yaof20/verl recipe/dapo/run_dapo_qwen2.5_32b_tis.sh"
_VCPO = "mit-han-lab/vcpo recipe/fully_async_policy/shell/vcpo/math/vcpo_k=10.sh"
_VESPO = "FloyedShen/VESPO recipe/vespo/run/sync/vespo_N_8.sh"
_NO_ICEPOP_CLIP = "no value found for arXiv 2510.18855; 0.2 is PPO's and verl's"
_ICEPOP = "arXiv 2510.18855, as allenai/open-instruct pull 1650 and rllm-org/rllm pull 741 have it"


def _correction(**known: str) -> Mapping[str, str]:
    """The sources of ``importance_correction``; what is not known is off, as in the recipe."""
    off = dict.fromkeys(("min_weight", "max_weight", "keep_low", "keep_high", "veto"), "not in the recipe")
    rest = {**off, "normalize": "not in the recipe", "denominator": "nothing leaves the mean in the recipe", **known}
    return {f"importance_correction.{key}": source for key, source in rest.items()}


VCPO_SOURCES: Mapping[str, str] = {
    **_correction(level=f"{_VCPO}: rollout_is sequence", max_weight=f"{_VCPO}: 8.0"),
    "ess_scale.base": f"{_VCPO}: 1.0",
    "ess_scale.power": f"{_VCPO}: the rule sqrt, so 0.5",
    "ess_scale.anchor": f"{_VCPO}: use_rollout_log_probs",
}

OFF_POLICY: Mapping[str, Preset] = {
    "vespo": Preset(
        compose(
            VESPO(positive_power=2.0, positive_decay=3.0, negative_power=3.0, negative_decay=2.0, anchor="old"),
            TokenMean(),
        ),
        "grpo",
        "VESPO: a smooth kernel of the importance weight of the whole response replaces the ratio.",
        {
            "vespo.positive_power": f"{_VESPO}: 2.0",
            "vespo.positive_decay": f"{_VESPO}: 3.0",
            "vespo.negative_power": f"{_VESPO}: 3.0",
            "vespo.negative_decay": f"{_VESPO}: 2.0",
            "vespo.anchor": f"{_VESPO}: no rollout weights",
        },
    ),
    "dppo": Preset(
        compose(DPPO(divergence="tv", high=0.15, low=0.15, cap=10000.0, anchor="rollout"), ConstantLength(length=8192)),
        "dr_grpo",
        "DPPO, binary TV: a token is stopped once it has moved too much probability.",
        {
            "dppo.divergence": f"{_DPPO}: dppo_tv",
            "dppo.high": f"{_DPPO}: 0.15",
            "dppo.low": f"{_DPPO}: 0.15",
            "dppo.cap": f"{_DPPO}: 10000.0",
            "dppo.anchor": f"{_DPPO}: bypass_mode",
            "dppo.stops": f"{_DPPO}: dppo_tv",
            "constant_length.length": f"{_DPPO}: max_response_length 8192; set it to yours",
        },
    ),
    "cppo": Preset(
        compose(
            CPPO(delta=0.15, min_weight=0.8, min_budget=0.02, quantile=0.9, anchor="rollout"),
            ConstantLength(length=16384),
        ),
        "dr_grpo",
        "CPPO, dense models: DPPO's bound, minus what the prefix has moved; set old_logprobs: rollout.",
        {
            "cppo.delta": "Tencent-Hunyuan/UniRL CPPO/README.md, dense models, from arXiv 2606.10968 table 3: 0.15",
            "cppo.min_weight": f"{_CPPO}: 0.8",
            "cppo.min_budget": f"{_CPPO}: 0.02",
            "cppo.quantile": "arXiv 2606.10968 eq. 22: 0.9",
            "cppo.anchor": f"{_CPPO}: old_logp_source is rollout",
            "constant_length.length": f"{_CPPO}: horizon 16384; set it to yours",
        },
    ),
    "drpo": Preset(
        compose(DRPO(delta=12.5, anchor="rollout"), ConstantLength(length=8192)),
        "dr_grpo",
        "DRPO: the gradient fades with the probability that has moved; set old_logprobs: rollout.",
        {
            "drpo.delta": f"{_DRPO}: 12.5",
            "drpo.anchor": "Tencent-Hunyuan/UniRL DRPO/README.md: the log-probs of the rollout",
            "constant_length.length": f"{_DRPO}: horizon 8192; set it to yours",
        },
    ),
    "m2po": Preset(
        compose(M2PO(budget=0.04), TokenMean()),
        "grpo",
        "M2PO: the tokens that moved furthest are dropped; set old_logprobs: rollout and refresh: step.",
        {"m2po.budget": "Infini-AI-Lab/M2PO train-scripts/m2po-qwen-math-7b-s256.sh: 0.04"},
    ),
    "tis": Preset(
        compose(
            ClipHigher(low=0.2, high=0.28, dual_clip=10.0),
            ImportanceCorrection(level="token", max_weight=2.0),
            TokenMean(),
        ),
        "grpo",
        "Truncated importance sampling on DAPO: weights correct the mismatch with the sampler.",
        {
            **script(_TIS, "0.2", "0.28", "10.0"),
            **_correction(level=f"{_TIS}: tis_imp_ratio_cap, of each token", max_weight=f"{_TIS}: 2.0"),
        },
    ),
    "icepop": Preset(
        compose(
            ClipHigher(low=0.2, high=0.2),
            ImportanceCorrection(level="token", max_weight=None, keep_low=0.5, keep_high=5.0, denominator="all"),
            SequenceMean(),
        ),
        "grpo",
        "IcePop: tokens on which sampler and trainer disagree are dropped; its KL is left out.",
        {
            **clip(*[_NO_ICEPOP_CLIP] * 2),
            **_correction(
                level="arXiv 2510.18855: of each token", keep_low=f"{_ICEPOP}: 0.5", keep_high=f"{_ICEPOP}: 5.0"
            ),
        },
    ),
    "vcpo": Preset(
        compose(
            ImportanceCorrection(level="sequence", max_weight=8.0),
            ESSScale(base=1.0, power=0.5, anchor="rollout"),
            SequenceMean(),
        ),
        "opob",
        "VCPO: importance weights per response, steps scaled by sample size, minimum-variance baseline.",
        VCPO_SOURCES,
    ),
}
