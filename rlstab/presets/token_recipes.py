"""Recipes that treat some tokens otherwise: masks, weights, and penalties on a few."""

from collections.abc import Mapping

from rlstab.core.compose import compose
from rlstab.presets.grpo_family import DAPO_CLIP, JUSTRL_DUAL
from rlstab.presets.recipe import Preset, clip, script
from rlstab.zoo.ar import AR
from rlstab.zoo.clip_cov import ClipCov
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.fipo import FIPO
from rlstab.zoo.kl import KLPenalty
from rlstab.zoo.kl_cov import KLCov
from rlstab.zoo.lp_reg import LpReg
from rlstab.zoo.s2t import S2TMask
from rlstab.zoo.stare import STARE
from rlstab.zoo.steer import STEER
from rlstab.zoo.token_mean import TokenMean
from rlstab.zoo.top_entropy import TopEntropyMask
from rlstab.zoo.wapo import WAPO

S2T_SOURCES = {
    "s2t.max_prob": "arXiv 2602.15620, all versions: 0.002",
    "s2t.quantile": "arXiv 2602.15620 v4-v5: 0.75",
    "s2t.population": "arXiv 2602.15620 v4-v5: rewarded tokens below max_prob",
}
STARE_SOURCES = {
    "stare.target_entropy": "arXiv 2606.19236, main setting: 0.3 nats",
    "stare.variant": "arXiv 2606.19236, default: O1",
    "stare.share": "arXiv 2606.19236, default: 10 %",
    "stare.boost": "arXiv 2606.19236, 7B setting: 1.1",
    "stare.damp": "arXiv 2606.19236, 7B setting: 0.9 (C2 only)",
    "stare.increment": "hp-luo/STARE: adaptive gains off",
    "stare.max_boost": "hp-luo/STARE: 1.5 (adaptive only)",
    "stare.min_damp": "hp-luo/STARE: 0.5 (adaptive only)",
}
_AR = "zhyang2226/AR-Lopti scripts/train_kklogic_AR_4x80GB.sh"
_CLIP_COV = "PRIME-RL/Entropy-Mechanism-of-RL recipe/dapo/7b_clip_cov.sh"
_FIPO = "Henrymachiyu/FIPO recipe/fipo/run_fipo_qwen2.5_32b.sh"
_KL_COV = "PRIME-RL/Entropy-Mechanism-of-RL recipe/dapo/7b_kl_cov.sh"
_STEER = "zz-haooo/STEER run/run_exp.sh"
_WAPO = "layer6ai-labs/wapo configs/vf-rl/numina_lean_math.toml"

TOKENS: Mapping[str, Preset] = {
    "20_entropy": Preset(
        compose(ClipHigher(low=0.2, high=0.28), TopEntropyMask(share=0.2, denominator="kept"), TokenMean()),
        "grpo",
        "Beyond the 80/20 rule: DAPO's loss on the fifth of highest entropy, divided by these tokens alone.",
        {
            **DAPO_CLIP,
            "top_entropy.share": "arXiv 2506.01939 eq. 6: 0.2",
            "top_entropy.denominator": "arXiv 2506.01939 eq. 6, later versions: selected tokens; v1, TRL: all",
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
        {**script("hp-luo/STARE script", "0.2", "0.28", "10"), **STARE_SOURCES},
    ),
    "stapo": Preset(
        compose(ClipHigher(low=0.2, high=0.28, dual_clip=10.0), S2TMask(), TokenMean()),
        "grpo",
        "STAPO: JustRL with spurious tokens dropped.",
        {**clip("arXiv 2602.15620: 0.2", "arXiv 2602.15620: 0.28", JUSTRL_DUAL), **S2T_SOURCES},
    ),
    "clip_cov": Preset(
        compose(
            ClipHigher(low=1.0, high=1.0),
            ClipCov(share=0.0002, low=1.0, high=5.0, clip_low=1.0, clip_high=1.0),
            TokenMean(),
        ),
        "grpo",
        "Clip-Cov: no gradient on a few tokens whose log-prob and advantage covary.",
        {
            **script(_CLIP_COV, "1", "1", "passed, and not in its loss"),
            "clip_cov.share": f"{_CLIP_COV}: 0.0002",
            "clip_cov.low": f"{_CLIP_COV}: 1.0",
            "clip_cov.high": f"{_CLIP_COV}: 5.0",
            "clip_cov.clip_low": f"{_CLIP_COV}: 1",
            "clip_cov.clip_high": f"{_CLIP_COV}: 1",
            "clip_cov.seed": "ours; the published draw has none",
        },
    ),
    "kl_cov": Preset(
        compose(KLCov(share=0.002, coefficient=1.0), TokenMean()),
        "grpo",
        "KL-Cov: no clip; the tokens with the largest covariance are held close to the old policy.",
        {"kl_cov.share": f"{_KL_COV}, in percent: 0.2", "kl_cov.coefficient": f"{_KL_COV}: 1"},
    ),
    "steer": Preset(
        compose(
            ClipHigher(low=0.2, high=0.28, dual_clip=10.0), STEER(high=1.0, low=0.8, form="exponential"), TokenMean()
        ),
        "grpo",
        "STEER: DAPO's clip, and tokens that would change entropy the most weigh less.",
        {
            **script(_STEER, "0.2", "0.28", "10.0"),
            "steer.high": f"{_STEER}: 1.0 (without effect in this form)",
            "steer.low": f"{_STEER}: 0.8",
            "steer.form": f"{_STEER}: linear is False",
        },
    ),
    "fipo": Preset(
        compose(
            ClipHigher(low=0.2, high=0.28, dual_clip=10.0),
            FIPO(half_life=32.0, low=1.0, high=1.2, max_ratio=10.0, safe_ratio=10.0),
            TokenMean(),
        ),
        "grpo",
        "FIPO: DAPO's loss, with tokens weighted by how the policy moved on what follows them.",
        {
            **script(_FIPO, "0.2", "0.28", "10.0"),
            "fipo.half_life": f"{_FIPO}: 32.0",
            "fipo.low": f"{_FIPO}: future_kl_clip_high_only, so 1",
            "fipo.high": f"{_FIPO}: future_kl_clip_ratio 0.2, so 1.2",
            "fipo.max_ratio": "Henrymachiyu/FIPO verl/trainer/ppo/core_algos.py, clip_ratio_c: 10",
            "fipo.safe_ratio": f"{_FIPO}: 10.0",
        },
    ),
    "ar": Preset(
        compose(
            ClipHigher(low=0.2, high=0.24, dual_clip=10.0),
            AR(alpha=0.2),
            TokenMean(),
            KLPenalty(coefficient=0.001, estimator="k3", cap=10.0),
        ),
        "grpo",
        "Advantage reweighting: rare tokens weigh less, so that they do not drown the likely ones.",
        {
            **script(_AR, "0.20", "0.24", "10.0"),
            "ar.alpha": f"{_AR}: 0.2",
            "kl.coefficient": f"{_AR}: 0.001",
            "kl.estimator": f"{_AR}: low_var_kl, which is k3",
            "kl.cap": "zhyang2226/AR-Lopti verl/trainer/ppo/core_algos.py: 10",
            "kl.anchor": f"{_AR}: use_kl_loss, to the reference",
        },
    ),
    "wapo": Preset(
        compose(ClipHigher(low=1.0, high=9.0), WAPO(length=8192)),
        "dr_grpo",
        "WAPO: learn only from responses above the mean of their group.",
        {
            **clip("none in its loss: 1.0 stops no token", f"{_WAPO}: 9.0", "none in its loss"),
            "wapo.length": f"{_WAPO}: max_seq_len 8192; set it to yours",
        },
    ),
}
