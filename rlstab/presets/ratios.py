"""Recipes that replace the ratio of a token, or how far it may go."""

from collections.abc import Mapping

from rlstab.core.compose import compose
from rlstab.presets.recipe import Preset, clip
from rlstab.zoo.aspo import ASPO
from rlstab.zoo.ce_gppo import CEGPPO
from rlstab.zoo.cispo import CISPO
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.gmpo import GMPO
from rlstab.zoo.gspo import GSPO
from rlstab.zoo.holder_mean import HolderMean
from rlstab.zoo.maspo import MASPO
from rlstab.zoo.sapo import SAPO
from rlstab.zoo.sequence_mean import SequenceMean
from rlstab.zoo.token_mean import TokenMean

_ASPO = "wizard-III/Archer2.0 scripts/train/run_archer2.0_qwen2.5_1.5b_math.sh"
_CE_GPPO = "Kwai-Klear/CE-GPPO recipe/dapo/7B_perf_run_gppo_v1_beta1_075_beta2_1_ours_math.sh"
_GMPO = "callsys/GMPO scripts/qwen2.5-math-7b-gmpo.sh"
_HOLDER = "YihangChen9/HolderPO scripts/qwen2.5-math-7b-holder.sh"
_MASPO = "FlyTune/MASPO-RL examples/maspo_trainer/run_deepseek-r1-distill-qwen-7b.sh"

RATIOS: Mapping[str, Preset] = {
    "cispo": Preset(
        compose(CISPO(cap=5.0, floor=None), TokenMean()),
        "grpo",
        "CISPO: the importance weight is capped, and no token is stopped; the cap is ScaleRL's.",
        {
            "cispo.cap": "arXiv 2506.13585 gives no value; arXiv 2510.13786 (ScaleRL): 5",
            "cispo.floor": "arXiv 2506.13585: no lower bound",
            "cispo.negative_cap": "arXiv 2506.13585: one bound for every token",
            "cispo.negative_floor": "arXiv 2506.13585: no lower bound",
        },
    ),
    "gspo": Preset(
        compose(GSPO(), ClipHigher(low=3e-4, high=4e-4), SequenceMean()),
        "grpo",
        "GSPO: one ratio per response, clipped as a whole.",
        clip("arXiv 2507.18071 section 5.1: 0.0003", "arXiv 2507.18071 section 5.1: 0.0004"),
    ),
    "gmpo": Preset(
        compose(GMPO(low=0.4, high=0.4), SequenceMean()),
        "grpo",
        "GMPO: the geometric mean of the ratios of a response, each of which is clipped first.",
        {"gmpo.low": f"{_GMPO}: 0.4", "gmpo.high": f"{_GMPO}: 0.4"},
    ),
    "holder_mean": Preset(
        compose(HolderMean(power=2.0, final_power=-2.0, steps=500), ClipHigher(low=0.2, high=0.2), SequenceMean()),
        "grpo",
        "HölderPO: one ratio per response, a power mean whose power falls over training.",
        {
            **clip(*[f"{_HOLDER}: 0.2"] * 2),
            "holder_mean.power": f"{_HOLDER}, linear_dec from: 2.0",
            "holder_mean.final_power": f"{_HOLDER}, linear_dec to: -2.0",
            "holder_mean.steps": f"{_HOLDER}, counted in rollouts: 500",
        },
    ),
    "sapo": Preset(
        compose(SAPO(positive=1.0, negative=1.05), SequenceMean()),
        "grpo",
        "SAPO: a smooth gate on the ratio instead of a clip.",
        {"sapo.positive": "arXiv 2511.20347: 1.0", "sapo.negative": "arXiv 2511.20347: 1.05"},
    ),
    "maspo": Preset(
        compose(
            MASPO(
                sigma=1.0,
                alpha=0.3,
                positive=0.03,
                negative=0.03,
                max_sigma=10.0,
                min_scale=0.1,
                max_scale=10.0,
                cap=None,
            ),
            TokenMean(),
        ),
        "grpo",
        "MASPO: a Gaussian gate on the ratio, wider for rare tokens and large advantages.",
        {
            "maspo.sigma": f"{_MASPO}: 1",
            "maspo.alpha": f"{_MASPO}: 0.3",
            "maspo.positive": f"{_MASPO}: 0.03",
            "maspo.negative": f"{_MASPO}: 0.03",
            "maspo.max_sigma": f"{_MASPO}: 10",
            "maspo.min_scale": f"{_MASPO}: 0.1",
            "maspo.max_scale": f"{_MASPO}: 10",
            "maspo.cap": "ours; FlyTune/MASPO-RL has none",
        },
    ),
    "ce_gppo": Preset(
        compose(CEGPPO(low=0.2, high=0.2, pull_low=0.75, pull_high=1.0, dual_clip=10.0), TokenMean()),
        "grpo",
        "CE-GPPO, 7B: beyond the clip a token keeps a bounded gradient instead of none.",
        {
            "ce_gppo.low": f"{_CE_GPPO}: 0.2",
            "ce_gppo.high": f"{_CE_GPPO}: 0.2",
            "ce_gppo.pull_low": f"{_CE_GPPO}: 0.75",
            "ce_gppo.pull_high": f"{_CE_GPPO}: 1.0",
            "ce_gppo.dual_clip": f"{_CE_GPPO}: 10.0",
        },
    ),
    "aspo": Preset(
        compose(ASPO(room=0.2, room_high_entropy=0.4, share=0.2, cap=3.0), TokenMean()),
        "grpo",
        "ASPO: rewarded tokens are weighted by the inverse ratio; the KL of its scripts (0.001) is left out.",
        {
            "aspo.room": f"{_ASPO}: 0.2",
            "aspo.room_high_entropy": f"{_ASPO}: 0.4",
            "aspo.share": f"{_ASPO}: token_entropy_quantile 0.8, so 0.2",
            "aspo.cap": "wizard-III/Archer2.0 verl/trainer/ppo/core_algos.py, compute_policy_loss_archer: 3.0",
        },
    ),
}
