"""Recipes in which a teacher grades the policy's own tokens (on-policy distillation)."""

from collections.abc import Mapping

from rlstab.core.compose import compose
from rlstab.presets.recipe import Preset, clip
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.iw_opd import IWOPD
from rlstab.zoo.kl import KLPenalty
from rlstab.zoo.opd import OPD
from rlstab.zoo.rlsd import RLSD
from rlstab.zoo.sdar import SDAR
from rlstab.zoo.sequence_mean import SequenceMean
from rlstab.zoo.token_mean import TokenMean

_SWIFT = "modelscope/ms-swift swift/rlhf_trainers/args_mixin.py (commit 3602360)"
_GRPO = {
    **clip(f"{_SWIFT}: 0.2", f"{_SWIFT}: 0.2"),
    "kl.coefficient": "modelscope/ms-swift swift/arguments/rlhf_args.py: 0.04",
    "kl.estimator": "modelscope/ms-swift: k3",
    "kl.cap": "modelscope/ms-swift has none",
    "kl.anchor": "modelscope/ms-swift: the reference model",
}
_TINKER = "thinking-machines-lab/tinker-cookbook distillation/train_on_policy.py (commit 9dfcc3a)"
_IW = "huggingface/trl trl/experimental/iw_opd/iw_opd_config.py, release 1.16"

DISTILLATION: Mapping[str, Preset] = {
    "opd": Preset(
        compose(OPD(coefficient=1.0, alone=True), TokenMean()),
        "grpo",
        "On-policy distillation: the teacher grades each token, and rewards are left out. Name it as model.teacher.",
        {
            "opd.coefficient": f"{_TINKER}: 1.0",
            "opd.alone": "thinking-machines-lab/tinker-cookbook: its distillation environments give no reward",
        },
    ),
    "iw_opd": Preset(
        compose(IWOPD(gain=0.5), TokenMean()),
        "grpo",
        "IW-OPD: on-policy distillation that counts early tokens more. Name the teacher as model.teacher.",
        {"iw_opd.gain": f"{_IW}: 0.5"},
    ),
    "rlsd": Preset(
        compose(
            ClipHigher(low=0.2, high=0.2),
            KLPenalty(coefficient=0.04, cap=None),
            RLSD(mix=0.5, clip=0.2),
            SequenceMean(),
        ),
        "grpo",
        "RLSD: GRPO whose tokens a teacher weighs, without turning any around. The teacher has to see the answer.",
        {
            **_GRPO,
            "rlsd.mix": f"{_SWIFT}: 0.5",
            "rlsd.clip": f"{_SWIFT}: 0.2",
            "rlsd.punished_only": f"{_SWIFT}: off",
        },
    ),
    "sdar": Preset(
        compose(
            ClipHigher(low=0.2, high=0.2),
            KLPenalty(coefficient=0.04, cap=None),
            SDAR(coefficient=0.1, sharpness=5.0),
            SequenceMean(),
        ),
        "grpo",
        "SDAR: GRPO and a gated pull towards what a teacher with a hint endorses; see model.teacher_prompt.",
        {
            **_GRPO,
            "sdar.coefficient": f"{_SWIFT}: 0.1 by a comment on the reference code",
            "sdar.sharpness": f"{_SWIFT}: 5.0",
        },
    ),
}
