"""Settings of each method at which it has something to do on the steps of the laws; each method has some."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

from rlstab.core.compose import Composition, compose
from rlstab.core.objective import TokenObjective
from rlstab.errors import Conflict
from rlstab.zoo.adaptive_entropy import AdaptiveEntropy
from rlstab.zoo.cispo import CISPO
from rlstab.zoo.clip_higher import ClipHigher
from rlstab.zoo.constant_length import ConstantLength
from rlstab.zoo.entropy_bonus import EntropyBonus
from rlstab.zoo.gmpo import GMPO
from rlstab.zoo.gspo import GSPO
from rlstab.zoo.kl import KLPenalty
from rlstab.zoo.lp_reg import LpReg
from rlstab.zoo.random_mask import RandomMask
from rlstab.zoo.s2t import S2TMask
from rlstab.zoo.sapo import SAPO
from rlstab.zoo.sequence_mean import SequenceMean
from rlstab.zoo.stare import STARE
from rlstab.zoo.token_mean import TokenMean
from rlstab.zoo.top_entropy import TopEntropyMask

EXAMPLES: Mapping[str, tuple[TokenObjective, ...]] = {
    "adaptive_entropy": (AdaptiveEntropy(target_entropy=0.8, initial=0.002),),
    "cispo": (CISPO(cap=1.1), CISPO(cap=1.2, floor=0.9)),
    "clip_higher": (ClipHigher(), ClipHigher(low=0.1, high=0.1, dual_clip=1.5)),
    "constant_length": (ConstantLength(length=7),),
    "entropy_bonus": (EntropyBonus(),),
    "gmpo": (GMPO(), GMPO(low=0.1, high=0.2)),
    "gspo": (GSPO(),),
    "kl": (
        *(KLPenalty(coefficient=0.1, estimator=one) for one in ("k1", "k2", "k3")),
        KLPenalty(estimator="k3_straight_through"),
    ),
    "lp_reg": (LpReg(share=0.3), LpReg(share=0.4, form="code"), LpReg(share=0.3, ratio_cap=1.2)),
    "random_mask": (RandomMask(share=0.3), RandomMask(share=0.5, sign="all", seed=7)),
    "s2t": (S2TMask(max_prob=0.02), S2TMask(max_prob=0.05, population="all", quantile=0.8)),
    "sapo": (SAPO(), SAPO(positive=3.0, negative=6.0)),
    "sequence_mean": (SequenceMean(),),
    "stare": (STARE(target_entropy=0.8), STARE(target_entropy=0.8, variant="C2", share=0.3, increment=0.05)),
    "token_mean": (TokenMean(),),
    "top_entropy": (TopEntropyMask(), TopEntropyMask(share=0.5, denominator="all")),
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
