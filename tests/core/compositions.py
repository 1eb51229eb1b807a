"""The compositions that the split laws are held to."""

from itertools import chain, combinations

from rlstab import (
    STARE,
    AdaptiveEntropy,
    ClipHigher,
    ConstantLength,
    EntropyBonus,
    KLPenalty,
    LpReg,
    RandomMask,
    S2TMask,
    SequenceMean,
    TopEntropyMask,
    compose,
    observe,
    within,
)
from rlstab.testing.examples import random_compositions
from tests.core.gate_methods import CISPO, VESPO
from tests.core.measuring_methods import CentredGate, CovarianceThreshold, PassRate

#: Two settings of each of the five, chosen so that on `steps.random_rows` each of them selects something.
FIVE = {
    "clip_higher": (ClipHigher(), ClipHigher(low=0.1, high=0.3, dual_clip=1.5)),
    "s2t": (S2TMask(), S2TMask(quantile=0.8, population="all")),
    "top_entropy": (TopEntropyMask(share=0.6), TopEntropyMask(share=0.3, denominator="all")),
    "lp_reg": (LpReg(share=0.4), LpReg(share=0.4, form="code")),
    "stare": (
        STARE(target_entropy=0.5),
        STARE(target_entropy=0.5, variant="C2", share=0.3, boost=1.2, damp=0.7, increment=0.1),
    ),
}
SUBSETS = list(chain.from_iterable(combinations(FIVE, size) for size in range(1, 6)))


def _others():
    first, second = ([pair[which] for pair in FIVE.values()] for which in (0, 1))
    adaptive = AdaptiveEntropy(target_entropy=0.5, initial=0.1, increment=0.02, high=0.2)
    yield "sequence_mean", compose(*first, SequenceMean())
    yield "sequence_mean, second settings", compose(*second, SequenceMean())
    yield "constant_length", compose(*second, ConstantLength(length=9))
    yield "kl", compose(*first, KLPenalty(coefficient=0.2), SequenceMean())
    yield "two kl", compose(KLPenalty(coefficient=0.2, estimator="k2"), KLPenalty(estimator="k3_straight_through"))
    yield "entropy_bonus", compose(*second, EntropyBonus(coefficient=0.1))
    yield "adaptive_entropy", compose(*first, adaptive)
    yield "random_mask", compose(*second, RandomMask(share=0.3))
    yield "ratio cap", compose(LpReg(share=0.4, ratio_cap=1.2), *first[1:3])
    yield "within", compose(first[0], within(first[1], second[4]), SequenceMean())
    yield "within, penalties", compose(first[0], within(first[2], compose(second[3], adaptive, KLPenalty())))
    yield "measured twice, and by group", compose(CovarianceThreshold(), PassRate(), CentredGate(), *first)
    yield "gates", compose(CISPO(), VESPO(), within(first[1], CentredGate()), *second[2:])
    yield "observed", compose(*first[:2], *(observe(one) for one in (*second, adaptive)))
    yield "nested within", compose(within(within(first[2], S2TMask(quantile=0.5)), second[4]), ConstantLength(length=9))


COMPOSITIONS = {
    **{"+".join(names): compose(*(FIVE[name][0] for name in names)) for names in SUBSETS},
    **{"+".join(names) + ", second settings": compose(*(FIVE[name][1] for name in names)) for names in SUBSETS},
    **dict(_others()),
    **{f"random: {'+'.join(one.keyed)} {number}": one for number, one in enumerate(random_compositions(12, seed=3))},
}
