"""Settings of each method at which it has something to do on the steps of the laws; each method has some."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

from rlstab.core.compose import Composition, compose
from rlstab.core.objective import TokenObjective
from rlstab.errors import Conflict
from rlstab.zoo.adaptive_entropy import AdaptiveEntropy
from rlstab.zoo.ar import AR
from rlstab.zoo.aspo import ASPO
from rlstab.zoo.block_mean import BlockMean
from rlstab.zoo.ce_gppo import CEGPPO
from rlstab.zoo.cispo import CISPO
from rlstab.zoo.clip_cov import ClipCov
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.constant_length import ConstantLength
from rlstab.zoo.cppo import CPPO
from rlstab.zoo.dcpo_clip import DCPOClip
from rlstab.zoo.dppo import DPPO
from rlstab.zoo.drpo import DRPO
from rlstab.zoo.entropy_bonus import EntropyBonus
from rlstab.zoo.entropy_shaping import EntropyShaping
from rlstab.zoo.ess_scale import ESSScale
from rlstab.zoo.fipo import FIPO
from rlstab.zoo.gmpo import GMPO
from rlstab.zoo.gspo import GSPO
from rlstab.zoo.holder_mean import HolderMean
from rlstab.zoo.importance_correction import ImportanceCorrection
from rlstab.zoo.kl import KLPenalty
from rlstab.zoo.kl_cov import KLCov
from rlstab.zoo.lp_reg import LpReg
from rlstab.zoo.m2po import M2PO
from rlstab.zoo.maspo import MASPO
from rlstab.zoo.mismatch import Mismatch
from rlstab.zoo.off_policy_mask import OffPolicyMask
from rlstab.zoo.random_mask import RandomMask
from rlstab.zoo.s2t import S2TMask
from rlstab.zoo.sapo import SAPO
from rlstab.zoo.sequence_mean import SequenceMean
from rlstab.zoo.sign_weights import SignWeights
from rlstab.zoo.stare import STARE
from rlstab.zoo.steer import STEER
from rlstab.zoo.stream_weight import StreamWeight
from rlstab.zoo.token_mean import TokenMean
from rlstab.zoo.top_entropy import TopEntropyMask
from rlstab.zoo.truncated_mask import TruncatedMask
from rlstab.zoo.vespo import VESPO
from rlstab.zoo.wapo import WAPO

EXAMPLES: Mapping[str, tuple[TokenObjective, ...]] = {
    "adaptive_entropy": (AdaptiveEntropy(target_entropy=0.8, initial=0.002),),
    "ar": (AR(), AR(alpha=0.9)),
    "aspo": (ASPO(), ASPO(room=0.05, room_high_entropy=0.3, share=0.5, cap=1.2)),
    "block_mean": (BlockMean(),),
    "ce_gppo": (CEGPPO(), CEGPPO(low=0.1, high=0.28, pull_low=0.5, pull_high=0.25, dual_clip=1.5)),
    "cispo": (CISPO(cap=1.1), CISPO(cap=1.2, floor=0.9)),
    "clip_cov": (
        ClipCov(share=0.1, low=0.3),
        ClipCov(share=0.3, low=-1.0, high=3.0, clip_low=0.1, clip_high=0.1, seed=3),
    ),
    "clip_higher": (ClipHigher(), ClipHigher(low=0.1, high=0.1, dual_clip=1.5)),
    "constant_length": (ConstantLength(length=7),),
    "cppo": (CPPO(delta=0.05), CPPO(delta=0.1, min_weight=0.5, min_budget=0.005, quantile=0.5, anchor="old")),
    "dcpo_clip": (DCPOClip(), DCPOClip(low=0.02, high=0.03, cap=1.5, dual_clip=None)),
    "dppo": (
        DPPO(high=0.05, low=0.05, cap=1.2),
        DPPO(divergence="kl", high=0.01, low=0.01),
        DPPO(high=0.1, low=0.05, cap=1.5, anchor="old"),
    ),
    "drpo": (DRPO(), DRPO(delta=0.15), DRPO(delta=0.1, anchor="old")),
    "entropy_bonus": (EntropyBonus(),),
    "entropy_shaping": (EntropyShaping(), EntropyShaping(alpha=0.1, kappa=5.0)),
    "ess_scale": (ESSScale(), ESSScale(base=0.9, power=1.0, anchor="old")),
    "fipo": (FIPO(), FIPO(half_life=2.0, low=0.8, high=1.5, max_ratio=1.3, safe_ratio=1.1)),
    "gmpo": (GMPO(), GMPO(low=0.1, high=0.2)),
    "gspo": (GSPO(),),
    "holder_mean": (HolderMean(steps=2), HolderMean(power=0.0, final_power=3.0, steps=4)),
    "importance_correction": (
        ImportanceCorrection(max_weight=1.01),
        ImportanceCorrection(level="sequence", min_weight=0.98, max_weight=1.02, normalize=True),
        ImportanceCorrection(max_weight=None, keep_low=0.99, keep_high=1.01, normalize=True, denominator="kept"),
        ImportanceCorrection(level="geometric", keep_low=0.995, veto=0.98),
        ImportanceCorrection(level="sequence", keep_high=1.01, denominator="kept"),
    ),
    "kl": (
        *(KLPenalty(coefficient=0.1, estimator=one) for one in ("k1", "k2", "k3")),
        KLPenalty(estimator="k3_straight_through"),
        KLPenalty(coefficient=0.1, estimator="k3_unbiased", cap=None),
    ),
    "kl_cov": (KLCov(share=0.1), KLCov(share=0.3, coefficient=0.2)),
    "lp_reg": (LpReg(share=0.3), LpReg(share=0.4, form="code"), LpReg(share=0.3, ratio_cap=1.2)),
    "m2po": (M2PO(budget=0.0001),),
    "maspo": (MASPO(), MASPO(sigma=0.2, alpha=0.5, positive=1.0, negative=2.0, max_sigma=0.5, cap=1.1)),
    "mismatch": (Mismatch(), Mismatch(of="logprobs"), Mismatch(of="logprobs", to="old_logprobs")),
    "off_policy_mask": (OffPolicyMask(max_gap=0.05), OffPolicyMask(max_gap=0.0, anchor="old")),
    "random_mask": (RandomMask(share=0.3), RandomMask(share=0.5, sign="all", seed=7)),
    "s2t": (S2TMask(max_prob=0.02), S2TMask(max_prob=0.05, population="all", quantile=0.8)),
    "sapo": (SAPO(), SAPO(positive=3.0, negative=6.0)),
    "sequence_mean": (SequenceMean(),),
    "sign_weights": (
        SignWeights(),
        SignWeights(positive=0.0),
        SignWeights(positive=1.0, negative=0.0),
    ),
    "stare": (STARE(target_entropy=0.8), STARE(target_entropy=0.8, variant="C2", share=0.3, increment=0.05)),
    "steer": (STEER(), STEER(low=0.5, form="linear")),
    "stream_weight": (StreamWeight(), StreamWeight(coefficient=0.3)),
    "token_mean": (TokenMean(),),
    "top_entropy": (TopEntropyMask(), TopEntropyMask(share=0.5, denominator="all")),
    "truncated_mask": (TruncatedMask(), TruncatedMask(denominator="all")),
    "vespo": (VESPO(), VESPO(positive_power=1.0, negative_decay=0.5, anchor="rollout")),
    "wapo": (WAPO(length=7),),
}


def random_compositions(count: int, seed: int) -> list[Composition]:
    """Different compositions of two and three methods that do not conflict, drawn by ``seed``."""
    rng = random.Random(seed)
    everything = [one for several in EXAMPLES.values() for one in several]
    chosen: dict[str, Composition] = {}
    for size in itertools.cycle((2, 3)):
        if len(chosen) >= count:
            return list(chosen.values())
        try:
            one = compose(*rng.sample(everything, size))
        except Conflict:
            continue
        chosen[repr(one)] = one
    return []
