"""GRPO and what only clips, averages or filters in another way."""

from collections.abc import Mapping

from rlstab.core.compose import compose
from rlstab.presets.recipe import Preset, clip, script
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.constant_length import ConstantLength
from rlstab.zoo.kl import KLPenalty
from rlstab.zoo.sequence_mean import SequenceMean
from rlstab.zoo.token_mean import TokenMean
from rlstab.zoo.truncated_mask import TruncatedMask

DAPO_CLIP: Mapping[str, str] = clip("arXiv 2503.14476, main setting: 0.2", "arXiv 2503.14476, main setting: 0.28")
JUSTRL_DUAL = "thunlp/JustRL training script: clip_ratio_c 10; the paper does not state it"
_DEEPCODER = "rllm-org/rllm scripts/train/deepcoder/deepcoder_14b_coding_16k.sh (commit 4ad1a98)"

GRPO_FAMILY: Mapping[str, Preset] = {
    "grpo": Preset(
        compose(ClipHigher(low=0.2, high=0.2), SequenceMean(), KLPenalty(coefficient=0.04, cap=None)),
        "grpo",
        "GRPO as first published: symmetric clip, mean per response, KL to the initial policy.",
        {
            **clip(*["arXiv 2402.03300 gives no value; 0.2 is PPO's and TRL's"] * 2),
            "kl.coefficient": "arXiv 2402.03300 section 4.2: 0.04",
            "kl.estimator": "arXiv 2402.03300 eq. 4: k3",
            "kl.cap": "arXiv 2402.03300 eq. 4 has none",
            "kl.anchor": "arXiv 2402.03300 eq. 4: pi_ref",
        },
    ),
    "dapo": Preset(
        compose(ClipHigher(low=0.2, high=0.28), TokenMean()),
        "grpo",
        "DAPO's loss: more room upwards, mean over tokens, no KL.",
        DAPO_CLIP,
    ),
    "dr_grpo": Preset(
        compose(ClipHigher(low=0.2, high=0.2), ConstantLength(length=3000)),
        "dr_grpo",
        "Dr. GRPO: no division by the standard deviation or by the response length.",
        {
            **clip(*["sail-sg/understand-r1-zero: 0.2"] * 2),
            "constant_length.length": "sail-sg/understand-r1-zero: generate_max_length 3000; set it to yours",
        },
    ),
    "grpo_plus": Preset(
        compose(ClipHigher(low=0.2, high=0.28), TruncatedMask(denominator="kept"), TokenMean()),
        "grpo",
        "DeepCoder's GRPO+: DAPO's loss, and nothing is learned from truncated responses.",
        {
            **script(_DEEPCODER, "0.2", "0.28", "not set"),
            "truncated_mask.denominator": f"{_DEEPCODER}: mask_truncated_samples; DeepCoder does not say what divides",
        },
    ),
    "justrl": Preset(
        compose(ClipHigher(low=0.2, high=0.28, dual_clip=10.0), TokenMean()),
        "grpo",
        "JustRL: clip-higher and nothing else; STAPO builds on it.",
        clip("arXiv 2512.16649: 0.2", "arXiv 2512.16649: 0.28", JUSTRL_DUAL),
    ),
}
