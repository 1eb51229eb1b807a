"""Named compositions: published recipes as far as the loss and the advantage go, each value with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlstab.core.compose import compose, within
from rlstab.core.objective import TokenObjective
from rlstab.errors import UnknownName, did_you_mean
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.constant_length import ConstantLength
from rlstab.zoo.kl import KLPenalty
from rlstab.zoo.lp_reg import LpReg
from rlstab.zoo.s2t import S2TMask
from rlstab.zoo.sequence_mean import SequenceMean
from rlstab.zoo.stare import STARE
from rlstab.zoo.token_mean import TokenMean
from rlstab.zoo.top_entropy import TopEntropyMask


@dataclass(frozen=True)
class Preset:
    """One recipe.

    Attributes:
        objective: its loss.
        estimator: advantage estimator, see :mod:`rlstab.stages.advantages`.
        about: what it is, one sentence.
        sources: ``method.setting`` to where the value comes from, for every setting of the objective.
    """

    objective: TokenObjective
    estimator: Literal["grpo", "dr_grpo", "rloo"]
    about: str
    sources: Mapping[str, str] = field(repr=False)


_OURS = "not in the paper; the neutral setting"
_DAPO_CLIP = {
    "clip_higher.low": "arXiv 2503.14476, main setting: 0.2",
    "clip_higher.high": "arXiv 2503.14476, main setting: 0.28",
}
_DUAL = {"clip_higher.dual_clip": "thunlp/JustRL training script: clip_ratio_c 10; the paper does not state it"}
_NO_DUAL = {"clip_higher.dual_clip": "not in the paper's objective"}
_S2T = {
    "s2t.max_prob": "arXiv 2602.15620, all versions: 0.002",
    "s2t.quantile": "arXiv 2602.15620 v4-v5: 0.75",
    "s2t.population": "arXiv 2602.15620 v4-v5: rewarded tokens below max_prob",
}
_STARE = {
    "stare.target_entropy": "arXiv 2606.19236, main setting: 0.3 nats",
    "stare.variant": "arXiv 2606.19236, default: O1",
    "stare.share": "arXiv 2606.19236, default: 10 %",
    "stare.boost": "arXiv 2606.19236, 7B setting: 1.1",
    "stare.damp": "arXiv 2606.19236, 7B setting: 0.9 (C2 only)",
    "stare.increment": "hp-luo/STARE: adaptive gains off",
    "stare.max_boost": "hp-luo/STARE: 1.5 (adaptive only)",
    "stare.min_damp": "hp-luo/STARE: 0.5 (adaptive only)",
}

PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(
        compose(ClipHigher(low=0.2, high=0.2), SequenceMean(), KLPenalty(coefficient=0.04, cap=None)),
        "grpo",
        "GRPO as first published: symmetric clip, mean per response, KL to the start.",
        {
            "clip_higher.low": "arXiv 2402.03300 gives no value; 0.2 is PPO's and TRL's",
            "clip_higher.high": "arXiv 2402.03300 gives no value; 0.2 is PPO's and TRL's",
            **_NO_DUAL,
            "kl.coefficient": "arXiv 2402.03300 section 4.2: 0.04",
            "kl.estimator": "arXiv 2402.03300 eq. 4: k3",
            "kl.cap": "arXiv 2402.03300 eq. 4 has none",
        },
    ),
    "dapo": Preset(
        compose(ClipHigher(low=0.2, high=0.28), TokenMean()),
        "grpo",
        "DAPO's loss: more room upwards, mean over tokens, no KL.",
        {**_DAPO_CLIP, **_NO_DUAL},
    ),
    "dr_grpo": Preset(
        compose(ClipHigher(low=0.2, high=0.2), ConstantLength(length=3000)),
        "dr_grpo",
        "Dr. GRPO: neither standard deviation nor response length divides anything.",
        {
            "clip_higher.low": "sail-sg/understand-r1-zero: 0.2",
            "clip_higher.high": "sail-sg/understand-r1-zero: 0.2",
            **_NO_DUAL,
            "constant_length.length": "sail-sg/understand-r1-zero: generate_max_length 3000; set it to yours",
        },
    ),
    "justrl": Preset(
        compose(ClipHigher(low=0.2, high=0.28, dual_clip=10.0), TokenMean()),
        "grpo",
        "JustRL: clip-higher and nothing else; what STAPO builds on.",
        {
            "clip_higher.low": "arXiv 2512.16649: 0.2",
            "clip_higher.high": "arXiv 2512.16649: 0.28",
            **_DUAL,
        },
    ),
    "20_entropy": Preset(
        compose(ClipHigher(low=0.2, high=0.28), TopEntropyMask(share=0.2, denominator="kept"), TokenMean()),
        "grpo",
        "Beyond the 80/20 rule: DAPO's loss on the fifth of the tokens with the highest entropy.",
        {
            **_DAPO_CLIP,
            **_NO_DUAL,
            "top_entropy.share": "arXiv 2506.01939 eq. 6: 0.2",
            "top_entropy.denominator": "arXiv 2506.01939 eq. 6: selected tokens",
        },
    ),
    "lp_reg": Preset(
        compose(LpReg(share=0.01, min_p=0.02, coefficient=1.0, form="paper", ratio_cap=10.0), TokenMean()),
        "grpo",
        "Lp-Reg: hold plausible rare tokens of punished responses; ratio capped at 10.",
        {
            "lp_reg.share": "arXiv 2510.03222, 14B: 1 %",
            "lp_reg.min_p": "arXiv 2510.03222: 0.02",
            "lp_reg.coefficient": "arXiv 2510.03222: 1.0",
            "lp_reg.form": "arXiv 2510.03222 eq. 6",
            "lp_reg.ratio_cap": "arXiv 2510.03222: 10",
        },
    ),
    "stare": Preset(
        compose(ClipHigher(low=0.2, high=0.28, dual_clip=10.0), STARE(), TokenMean()),
        "grpo",
        "STARE, variant O1: boost rare rewarded tokens while entropy is below the target.",
        {
            "clip_higher.low": "hp-luo/STARE script: 0.2",
            "clip_higher.high": "hp-luo/STARE script: 0.28",
            "clip_higher.dual_clip": "hp-luo/STARE script: 10",
            **_STARE,
        },
    ),
    "stapo": Preset(
        compose(ClipHigher(low=0.2, high=0.28, dual_clip=10.0), S2TMask(), TokenMean()),
        "grpo",
        "STAPO: JustRL with spurious tokens dropped.",
        {
            "clip_higher.low": "arXiv 2602.15620: 0.2",
            "clip_higher.high": "arXiv 2602.15620: 0.28",
            **_DUAL,
            **_S2T,
        },
    ),
    "recommended": Preset(
        compose(ClipHigher(low=0.2, high=0.28, dual_clip=10.0), within(S2TMask(), STARE(variant="O1")), TokenMean()),
        "grpo",
        "Our stack: JustRL, spurious tokens dropped, and STARE's boost among the tokens that are left.",
        {
            "clip_higher.low": "arXiv 2503.14476: 0.2",
            "clip_higher.high": "arXiv 2503.14476: 0.28",
            **_DUAL,
            **_S2T,
            **_STARE,
        },
    ),
}


def preset(name: str) -> Preset:
    """The recipe of this name.

    Raises:
        UnknownName: with the nearest known name.
    """
    if name not in PRESETS:
        raise UnknownName(f"no preset is called '{name}'. {did_you_mean(name, PRESETS)}")
    return PRESETS[name]
