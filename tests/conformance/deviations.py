"""Where rlstab differs from published code on purpose: one number of theirs, the same number here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from rlstab import (
    ASPO,
    CEGPPO,
    CISPO,
    DPPO,
    DRPO,
    FIPO,
    GMPO,
    M2PO,
    SAPO,
    STARE,
    STEER,
    VESPO,
    ClipCov,
    ClipHigher,
    ConstantLength,
    ImportanceCorrection,
    KLCov,
    KLPenalty,
    LpReg,
    Pool,
    SequenceMean,
    TokenMean,
    TopEntropyMask,
    TruncatedMask,
    compose,
)
from rlstab.core.objective import TokenObjective
from rlstab.stages import advantages as estimators
from tests.conformance.agreements import (
    CUT_OFF,
    RATIOS_OLD,
    TRL_TOP,
    VERL,
    WIDER,
    boosted,
    covariance,
    dropped,
    gains,
    handed_in,
    held,
    kept,
    mean_entropy,
    penalised,
    rejecting,
    signals_of,
    weighted,
)
from tests.conformance.record import LENGTH, tensors
from tests.conformance.recorded import Result, load, ours, theirs

#: One of the two numbers of a deviation, and what it has to be.
Number = Callable[[], float]


@dataclass(frozen=True)
class Deviation:
    """One difference.

    Attributes:
        method: whose card, or docstring, names it.
        says: words of it.
        source: file of ``data/`` that holds theirs.
        number: what is compared, in words.
        theirs: as stored.
        here: as rlstab gives it.
        expected: both, derived or measured once.
    """

    method: type[TokenObjective] | ModuleType
    says: str
    source: str
    number: str
    theirs: Number
    here: Number
    expected: tuple[float, float]


def loss(result: Callable[[], Result]) -> Number:
    return lambda: float(result()["loss"])


def slope(result: Callable[[], Result], row: int, place: int) -> Number:
    return lambda: float(result()["gradient"][row, place])


def chosen(result: Callable[[], Result]) -> Number:
    return lambda: float(result()["selected"].sum())


def still(result: Callable[[], Result]) -> Number:
    """Tokens of ``ratios`` without a gradient."""
    return lambda: float((tensors("ratios")["mask"].bool() & (result()["gradient"] == 0)).sum())


def stored(source: str, case: str) -> Callable[[], Result]:
    return lambda: theirs(source, case)


def found(source: str, case: str, *methods: TokenObjective, **options: object) -> Callable[[], Result]:
    return lambda: ours(compose(*methods), source, case, **options)  # type: ignore[arg-type]


def advantage(source: str, case: str, row: int) -> Number:
    return lambda: load(source)["advantages"][case]["advantages"][row]


def estimated(rewards: str, row: int, estimator: Callable[..., Tensor], **settings: float) -> Number:
    def number() -> float:
        given = load("inputs")["rewards"][rewards]
        return float(estimator(torch.tensor(given["rewards"]), torch.tensor(given["ids"]), **settings)[row])

    return number


def held_in_the_step() -> Result:
    return held(RAGGED, local=None, scope="step", **signals_of("live"))


def covered_in_the_step() -> Result:
    method = compose(KLCov(share=0.2, coefficient=0.7))
    return ours(method, "verl", "kl_cov ragged", selected=penalised, scope="step")


RAGGED = "proxy of the live policy, ragged"
OPEN = STARE(target_entropy=99.0)
# two rows that count, of three: ratios e^0.1, e^-0.1, 1 with advantage 1, and 1 with advantage 0.5
ROWS = (math.exp(0.1) + math.exp(-0.1) + 1) / 3 + 0.5
SUMS = (math.exp(0.1) + math.exp(-0.1) + 1) + 0.5

DEVIATIONS = (
    Deviation(
        ClipHigher,
        "log-ratios are clamped to 20 nats",
        "trl",
        "gradient of a punished token at a log-ratio of 25, one of 4",
        slope(stored("trl", "extreme"), 1, 0),
        slope(found("trl", "extreme", WIDER), 1, 0),
        (math.exp(25) / 4, 0.0),
    ),
    Deviation(
        ClipHigher,
        "in verl it is halved at c",
        "verl",
        "gradient at a ratio of exactly c = 2, one of 2",
        slope(stored("verl", "ratio on the dual bound"), 0, 0),
        slope(found("verl", "ratio on the dual bound", ClipHigher(dual_clip=2.0)), 0, 0),
        (0.5, 1.0),
    ),
    Deviation(
        GMPO,
        "averages the responses of each micro-batch",
        "verl",
        "loss, micro-batches of 3, 1 and 4 rows, whose means are added",
        loss(stored("verl", "geo_mean ragged, means added")),
        loss(found("verl", "geo_mean ragged, means added", GMPO(low=0.1, high=0.3), SequenceMean())),
        (1.535, 0.8190),
    ),
    Deviation(
        CISPO,
        "the value of the loss is -clip(r) A",
        "trl",
        "loss at the same gradient",
        loss(stored("trl", "cispo")),
        loss(found("trl", "cispo", CISPO(cap=1.28))),
        (-0.2745, -0.09380),
    ),
    Deviation(
        CISPO,
        "a low below 1 is floor 1 - low",
        "verl",
        "gradient of a rewarded token at a ratio of 0.25, one of 36, low 0.2 there and no floor here",
        slope(stored("verl", "cispo"), 0, 1),
        slope(found("verl", "cispo", CISPO(cap=1.28)), 0, 1),
        (-0.8 * 1.25 / 36, -0.25 * 1.25 / 36),
    ),
    Deviation(
        SAPO,
        "the value of the loss is -g r A",
        "trl",
        "loss at the same gradient",
        loss(stored("trl", "sapo")),
        loss(found("trl", "sapo", SAPO(), SequenceMean())),
        (-0.3225, -0.06618),
    ),
    Deviation(
        DPPO,
        "it prints -M min(r, C) A l",
        "verl",
        "loss at the same gradient",
        loss(stored("verl", "dppo_tv 0.15, 0.15")),
        loss(found("verl", "dppo_tv 0.15, 0.15", DPPO(anchor="old"))),
        (-0.5444, 0.3824),
    ),
    Deviation(
        DPPO,
        "which is 3 where it is not set",
        "verl",
        "gradient of a punished token at a ratio of 4, one of 36, the cap being the default",
        slope(stored("verl", "dppo_tv, as configured"), 1, 0),
        slope(found("verl", "dppo_tv, as configured", DPPO(low=0.2, high=0.2, anchor="old")), 1, 0),
        (3 * 0.75 / 36, 4 * 0.75 / 36),
    ),
    Deviation(
        VESPO,
        "the value of the loss is -phi A",
        "trl",
        "loss at the same gradient",
        loss(stored("trl", "vespo")),
        loss(found("trl", "vespo", VESPO(anchor="old"))),
        (-0.3657, 0.01681),
    ),
    Deviation(
        VESPO,
        "weights that it may have truncated before",
        "trl",
        "gradient of a token whose response has two weights beyond 3, at which theirs are truncated, one of 36",
        slope(stored("trl", "vespo, engine truncated"), 2, 0),
        slope(found("trl", "vespo, engine truncated", VESPO(anchor="rollout")), 2, 0),
        (0.002569, 0.008914),
    ),
    Deviation(
        DRPO,
        "The value of the loss is -gate r A",
        "drpo",
        "loss at the same gradient, delta 0.15",
        loss(stored("drpo", "0.15")),
        loss(found("drpo", "0.15", DRPO(delta=0.15, anchor="old"))),
        (0.8899, 2.492),
    ),
    Deviation(
        ASPO,
        "the value of the loss is -pull A",
        "aspo",
        "loss at the same gradient",
        loss(stored("aspo", "two rooms")),
        loss(found("aspo", "two rooms", ASPO())),
        (0.5514, -0.01919),
    ),
    Deviation(
        M2PO,
        "what is cut still counts there, so more go",
        "m2po",
        "tokens of 36 without a gradient, budget 0.04",
        still(stored("m2po", "ratios")),
        still(found("m2po", "ratios", M2PO(), rollout=RATIOS_OLD)),
        (13, 12),
    ),
    Deviation(
        ClipCov,
        "means, count and draw are those of each micro-batch",
        "verl",
        "candidates of 45, micro-batches of 3, 1 and 4 rows",
        chosen(stored("verl", "clip_cov, all candidates, ragged")),
        chosen(found("verl", "clip_cov, all candidates, ragged", *covariance(1.0), selected=dropped, scope="step")),
        (6, 5),
    ),
    Deviation(
        KLCov,
        "means, count and largest values are those of each micro-batch",
        "verl",
        "tokens held of 45, micro-batches of 3, 1 and 4 rows, and how many of them here",
        chosen(stored("verl", "kl_cov ragged")),
        lambda: float((theirs("verl", "kl_cov ragged")["selected"] & covered_in_the_step()["selected"]).sum()),
        (9, 7),
    ),
    Deviation(
        STEER,
        "there they are those of a micro-batch of one device",
        "steer",
        "loss, micro-batches of 3, 1 and 4 rows, in float32",
        loss(stored("steer", "linear, ragged")),
        loss(found("steer", "linear, ragged", STEER(form="linear"), VERL, scope="step")),
        (0.2108, 0.1820),
    ),
    Deviation(
        FIPO,
        "there also over tool output between them",
        "fipo",
        "loss of a response with a hole",
        loss(stored("fipo", "a hole")),
        loss(
            found(
                "fipo",
                "a hole",
                FIPO(half_life=2.0, max_ratio=5.0, safe_ratio=4.5, low=0.1, high=1.9),
                ClipHigher(dual_clip=5.0),
            )
        ),
        (2.0967, 2.0941),
    ),
    Deviation(
        TruncatedMask,
        "Its means per sequence still count the response",
        "trl",
        "loss of eight responses, two of them truncated, loss_type grpo",
        loss(stored("trl", "truncated, grpo")),
        loss(found("trl", "truncated, grpo", TruncatedMask(), WIDER, SequenceMean(), truncated=CUT_OFF)),
        (0.2395, 0.3193),
    ),
    Deviation(
        CEGPPO,
        "beyond it the value of the loss there is -A c",
        "ce_gppo",
        "loss at the same gradient, dual clip 3",
        loss(stored("ce_gppo", "0.25, 0.6, dual clip 3")),
        loss(
            found(
                "ce_gppo",
                "0.25, 0.6, dual clip 3",
                CEGPPO(high=0.28, pull_low=0.25, pull_high=0.6, dual_clip=3.0),
            )
        ),
        (0.1832, -0.004289),
    ),
    Deviation(
        ImportanceCorrection,
        "its rejection by ``k1`` bounds the inverse ratio",
        "verl",
        "tokens kept of 36 by bounds of 0.5 and 3",
        chosen(stored("verl", "correction: tokens kept")),
        chosen(found("verl", "correction: tokens kept", rejecting("token", 0.5, 3.0), VERL, selected=kept)),
        (32, 26),
    ),
    Deviation(
        KLPenalty,
        "differ only where d is beyond 20 nats",
        "trl",
        "gradient of k3 at d = 25, one of 2",
        slope(stored("trl", "far ref"), 0, 1),
        slope(found("trl", "far ref", WIDER, KLPenalty(1.0, cap=None)), 0, 1),
        ((1 - math.exp(25)) / 2, 0.0),
    ),
    Deviation(
        TokenMean,
        "averages inside each micro-batch",
        "verl",
        "loss, micro-batches of 3, 1 and 4 rows",
        loss(stored("verl", "token-mean ragged, local")),
        loss(found("verl", "token-mean ragged, local", VERL)),
        (0.5566, 0.6835),
    ),
    Deviation(
        TokenMean,
        "TRL's ``bnpo`` likewise",
        "trl",
        "loss, micro-batches of 4 and 4 rows",
        loss(stored("trl", "bnpo halves")),
        loss(found("trl", "bnpo halves", WIDER)),
        (35.60, 34.22),
    ),
    Deviation(
        SequenceMean,
        "A response without tokens counts in S in TRL's ``grpo`` loss",
        "trl",
        "loss of three rows, one empty",
        loss(stored("trl", "empty row")),
        loss(found("trl", "empty row", WIDER, SequenceMean())),
        (-ROWS / 3, -ROWS / 2),
    ),
    Deviation(
        SequenceMean,
        "in verl where the size of the whole batch is given",
        "verl",
        "loss of three rows, one empty",
        loss(stored("verl", "empty row, counted")),
        loss(found("verl", "empty row, counted", VERL, SequenceMean())),
        (-ROWS / 3, -ROWS / 2),
    ),
    Deviation(
        SequenceMean,
        "TRL takes the mean of each micro-batch and then of these",
        "trl",
        "loss, micro-batches of 3, 1 and 4 rows",
        loss(stored("trl", "grpo ragged")),
        loss(found("trl", "grpo ragged", WIDER, SequenceMean())),
        (24.57, 31.30),
    ),
    Deviation(
        ConstantLength,
        "TRL's ``dr_grpo``: a response without tokens counts in S",
        "trl",
        "loss of three rows, one empty",
        loss(stored("trl", "empty row, dr_grpo")),
        loss(found("trl", "empty row, dr_grpo", WIDER, ConstantLength(length=LENGTH))),
        (-SUMS / 36, -SUMS / 24),
    ),
    Deviation(
        ConstantLength,
        "From its code",
        "dr_grpo",
        "loss of three rows, one empty",
        loss(stored("dr_grpo", "empty row")),
        loss(found("dr_grpo", "empty row", ConstantLength(length=LENGTH))),
        (-SUMS / 36, -SUMS / 24),
    ),
    Deviation(
        TopEntropyMask,
        "with a quantile per micro-step",
        "trl",
        "tokens kept of 45, micro-batches of 3, 1 and 4 rows",
        chosen(stored("trl", "top entropy ragged")),
        chosen(found("trl", "top entropy ragged", TRL_TOP, WIDER, selected=weighted, scope="step")),
        (10, 9),
    ),
    Deviation(
        TopEntropyMask,
        "is rounded to float32",
        "trl",
        "tokens kept of 5 at share 0.2, two of them adjacent in float32",
        chosen(stored("trl", "adjacent entropies")),
        chosen(found("trl", "adjacent entropies", TRL_TOP, WIDER, selected=weighted)),
        (2, 1),
    ),
    Deviation(
        TopEntropyMask,
        "unless n is below 5 or divisible by it",
        "lp_reg",
        "tokens kept of 19, 1 and 25, scope: microbatch",
        chosen(stored("lp_reg", "8020_split ragged")),
        chosen(found("lp_reg", "8020_split ragged", TopEntropyMask(), WIDER, selected=kept)),
        (9, 10),
    ),
    Deviation(
        TopEntropyMask,
        "of equal entropies only as many as fit",
        "lp_reg",
        "tokens kept of 5 at share 0.2, two of them equal",
        chosen(stored("lp_reg", "8020_split equal")),
        chosen(found("lp_reg", "8020_split equal", TopEntropyMask(), WIDER, selected=kept)),
        (1, 2),
    ),
    Deviation(
        STARE,
        "The code takes it inside each micro-batch of one device, at least one token in each",
        "stare",
        "tokens boosted of 18, micro-batches of 3, 1 and 4 rows",
        chosen(stored("stare", "O1 ragged")),
        chosen(found("stare", "O1 ragged", OPEN, VERL, selected=boosted, scope="step")),
        (3, 2),
    ),
    Deviation(
        STARE,
        "every token that ties with the last of the share is selected",
        "stare",
        "tokens boosted of 4 at share 0.25, three of them equal",
        chosen(stored("stare", "equal surprisals")),
        chosen(
            found(
                "stare",
                "equal surprisals",
                STARE(target_entropy=99.0, share=0.25),
                VERL,
                selected=boosted,
                scope="step",
            )
        ),
        (1, 3),
    ),
    Deviation(
        STARE,
        "Evidence from the rollout ranks by the old policy",
        "stare",
        "loss off-policy, refresh: rollout",
        loss(stored("stare", "O1 whole")),
        loss(found("stare", "O1 whole", OPEN, VERL, evidence="old")),
        (0.6781, 0.6764),
    ),
    Deviation(
        STARE,
        "the code uses them in k already",
        "stare",
        "W of the first optimizer step, whose entropy is above the target",
        lambda: load("stare")["controllers"]["adaptive"]["steps"][0]["boost"],
        lambda: gains("adaptive")[0]["boost"],
        (1.09, 1.1),
    ),
    Deviation(
        STARE,
        "aggregated like the loss",
        "stare",
        "mean entropy that the gate compares, under seq-mean-token-mean",
        lambda: load("stare")["mean_entropy"]["seq-mean-token-mean"],
        mean_entropy,
        (0.9186, 0.8734),
    ),
    Deviation(
        LpReg,
        "there those with live log-prob above the proxy keep their clip",
        "lp_reg",
        "gradient of a token above the proxy at a ratio of e^-1, clip 0.2, one of 12",
        slope(stored("lp_reg", "proxy handed in, narrow clip"), 0, 3),
        slope(lambda: held("proxy handed in, narrow clip", WIDER, **handed_in("proxy")), 0, 3),
        (0.0, math.exp(-1) / 12),
    ),
    Deviation(
        LpReg,
        "The code takes the share in each micro-batch of one device",
        "lp_reg",
        "tokens held, micro-batches of 3, 1 and 4 rows, and how many of them here",
        chosen(stored("lp_reg", RAGGED)),
        lambda: float((theirs("lp_reg", RAGGED)["selected"] & held_in_the_step()["selected"]).sum()),
        (4, 3),
    ),
    Deviation(
        LpReg,
        "takes the proxy of the old one",
        "lp_reg",
        "tokens held off-policy, refresh: step",
        chosen(stored("lp_reg", "proxy of the old policy")),
        chosen(lambda: held("proxy of the old policy", **signals_of("live"))),
        (2, 4),
    ),
    Deviation(
        LpReg,
        "it ranks by the live policy",
        "lp_reg",
        "tokens held off-policy, refresh: rollout",
        chosen(stored("lp_reg", "proxy of the old policy")),
        chosen(lambda: held("proxy of the old policy", evidence="old", **signals_of("old"))),
        (2, 1),
    ),
    Deviation(
        LpReg,
        "there a gap of about 100 nats gives NaN",
        "lp_reg",
        "gradient at d = 100, one of 3, float32",
        slope(stored("lp_reg", "far proxy"), 0, 2),
        slope(lambda: held("far proxy", **handed_in("proxy_far")), 0, 2),
        (math.nan, 1 / 3),
    ),
    Deviation(
        LpReg,
        "ties with the last of the share are selected too",
        "lp_reg",
        "tokens held of 4 at share 0.5, three of them equal",
        chosen(stored("lp_reg", "equal surprisals")),
        chosen(lambda: held("equal surprisals", **handed_in("equal_surprisal"))),
        (2, 3),
    ),
    Deviation(
        LpReg,
        "0.29 * 100 is 29 here, 28 there",
        "lp_reg",
        "tokens in the lowest 0.29 of 100, by its `int(n * share)`",
        lambda: int(100 * 0.29),
        lambda: Pool.top(torch.arange(100.0), 0.29, rounding="floor").threshold().nominal,
        (28, 29),
    ),
    Deviation(
        estimators,
        "leaves a lone answer its reward",
        "verl",
        "advantage (grpo) of the only answer of a prompt, reward 0.75",
        advantage("verl", "grpo, singleton", 2),
        estimated("singleton", 2, estimators.grpo, epsilon=1e-6),
        (0.75 / (1 + 1e-6), 0.0),
    ),
    Deviation(
        estimators,
        "leaves a lone answer its reward",
        "verl",
        "the same, rloo (rloo_vectorized gives 0, as here)",
        advantage("verl", "rloo, singleton", 2),
        estimated("singleton", 2, estimators.rloo),
        (0.75, 0.0),
    ),
    Deviation(
        estimators,
        "the rounding of a mean of equal rewards is divided by epsilon",
        "verl",
        "advantage (grpo) of eight answers with reward 0.7",
        advantage("verl", "grpo, equal", 0),
        estimated("equal", 0, estimators.grpo, epsilon=1e-6),
        (0.05603, 0.0),
    ),
    Deviation(
        estimators,
        "the rounding of a mean of equal rewards is divided by epsilon",
        "trl",
        "the same in TRL",
        advantage("trl", "equal", 0),
        estimated("equal", 0, estimators.grpo),
        (0.0005957, 0.0),
    ),
)
