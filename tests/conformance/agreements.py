"""The comparisons: which composition reproduces which published code. One entry is one row of docs/conformance.md."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstab import (
    AR,
    ASPO,
    CEGPPO,
    CISPO,
    CPPO,
    DPPO,
    DRPO,
    FIPO,
    GMPO,
    GSPO,
    MASPO,
    SAPO,
    STARE,
    STEER,
    VESPO,
    ClipCov,
    ClipHigher,
    ConstantLength,
    DCPOClip,
    ESSScale,
    HolderMean,
    ImportanceCorrection,
    KLCov,
    KLPenalty,
    LpReg,
    Mean,
    OffPolicyMask,
    PolicyOutputs,
    SequenceMean,
    TokenBatch,
    TokenMean,
    TopEntropyMask,
    TruncatedMask,
    compose,
    make_plan,
)
from rlstab.core.stats import Settled
from rlstab.core.terms import Terms
from rlstab.signals import token_signals_from_logits
from rlstab.stages import advantages as estimators
from tests.conformance.record import LENGTH, tensors
from tests.conformance.recorded import apart, by_parts, by_rows, by_rows_added, difference, load, ours, theirs

#: Largest difference that float64 rounding, a denominator with 1e-8 added, and float32 rounding may make.
EXACT, ADDED, SINGLE = 1e-13, 1e-8, 1e-6


@dataclass(frozen=True)
class Agreement:
    """One comparison.

    Attributes:
        method: what is compared.
        source: file of ``data/``.
        card: the method here.
        code: function of the published code.
        settings: the composition here, in words.
        cases: name of the stored case to the difference found.
        bound: largest difference that passes.
        of: what is compared.
    """

    method: str
    source: str
    card: str
    code: str
    settings: str
    cases: Mapping[str, Callable[[], float]]
    bound: float = EXACT
    of: str = "loss, gradient"

    def largest(self) -> float:
        return max(found() for found in self.cases.values())


def _loss(source: str, case: str, *methods: Any, **options: Any) -> Callable[[], float]:
    return lambda: difference(ours(compose(*methods), source, case, **options), theirs(source, case))


def _slope(source: str, case: str, *methods: Any, **options: Any) -> Callable[[], float]:
    """Of the gradient alone, where the same gradient is that of another value."""
    return lambda: difference(ours(compose(*methods), source, case, **options), theirs(source, case), ("gradient",))


def boosted(terms: Terms) -> Tensor:
    assert terms.weight is not None
    return terms.weight != 1


def weighted(terms: Terms) -> Tensor:
    assert terms.weight is not None
    return terms.weight != 0


def kept(terms: Terms) -> Tensor:
    assert terms.keep is not None
    return terms.keep


OLD, RATIOS_OLD = tensors("main")["old"], tensors("ratios")["old"]
#: The responses that were truncated where some were.
CUT_OFF = torch.zeros(8).index_fill(0, torch.tensor([0, 5]), 1.0)
#: As published code has it, in float32.
NEGATIVE = torch.tensor(1.05, dtype=torch.float32).item()
WIDER, TRL_TOP = ClipHigher(), TopEntropyMask(denominator="all")
UNBIASED_KL = KLPenalty(0.04, estimator="k3_unbiased", cap=None)
VERL = ClipHigher(dual_clip=10.0)
SEQUENCE = ClipHigher(low=0.1, high=0.15)


# -- STARE -------------------------------------------------------------------------------------------------------------


def stare(case: str, **settings: Any) -> Callable[[], float]:
    # in the stored cases the gate is handed in; here a target above every mean entropy opens it
    return _loss("stare", case, STARE(target_entropy=99.0, **settings), VERL, selected=boosted)


@functools.cache
def gains(name: str) -> tuple[Mapping[str, Any], ...]:
    """The state of each optimizer step of a stored controller's run."""
    stored = load("stare")["controllers"][name]
    method = STARE(target_entropy=stored["target_entropy"], increment=stored["alpha"])
    state, states = method.init_state(), []
    for one in stored["steps"]:
        state = method.advance(state, Settled({"entropy": Mean.scalar(one["entropy"])}))
        states.append(state)
    return tuple(states)


def controlled(name: str) -> float:
    """Gates step by step, gains one optimizer step later; infinite where a gate differs."""
    other, mine = load("stare")["controllers"][name]["steps"], gains(name)
    if [one["gate"] for one in mine] != [one["gate"] for one in other]:
        return math.inf
    return max(apart([one[gain] for one in mine[1:]], [one[gain] for one in other[:-1]]) for gain in ("boost", "damp"))


def mean_entropy() -> float:
    """What the gate compares with its target, on the stored entropies."""
    values = tensors("main")
    batch = TokenBatch.from_padded(
        response_mask=values["mask"],
        advantages=values["advantages"],
        old_logprobs=values["old"],
        entropies=values["entropies"],
    )
    measured = STARE().measure(batch)["entropy"]
    assert isinstance(measured, Mean)
    return measured.value


# -- Lp-Reg ------------------------------------------------------------------------------------------------------------


@functools.cache
def signals_of(logits: str, min_p: float = 0.02) -> Mapping[str, Tensor]:
    """``max_logprobs`` and ``log_kept_mass`` (and the log-probs) of the stored logits, (B, T)."""
    values = tensors("main")[f"{logits}_logits"]
    tokens = torch.tensor(load("inputs")["main"]["tokens"])
    names = {"logprobs", "max_logprobs", "log_kept_mass"}
    found = token_signals_from_logits(values.flatten(0, 1), tokens.flatten(), needs=names, min_p=min_p)
    return {name: getattr(found, name).view(tokens.shape) for name in sorted(names)}


def handed_in(inputs: str) -> Mapping[str, Tensor]:
    """Signals that make rlstab's proxy the stored one."""
    values = tensors(inputs)
    plausible = values["target"] > -1e3
    mass = torch.where(plausible, values["live"] - values["target"], 0.0)
    return {"max_logprobs": torch.where(plausible, values["live"], 0.0), "log_kept_mass": mass}


def held(case: str, *beside: Any, min_p: float = 0.02, **options: Any) -> dict[str, Any]:
    """Loss and gradient of Lp-Reg, and the tokens at which its coefficient matters."""
    options = {"local": by_rows_added} | options
    share = load("lp_reg")["cases"][case]["settings"]["logp_neg_k_percent"]
    cap = None if beside else 10.0
    on, off = (
        ours(
            compose(LpReg(form="code", share=share, min_p=min_p, coefficient=one, ratio_cap=cap), *beside),
            "lp_reg",
            case,
            **options,
        )
        for one in (1.0, 0.0)
    )
    return {**on, "selected": on["gradient"] != off["gradient"]}


def _lp_reg(case: str, signals: Callable[[], Mapping[str, Tensor]], **options: Any) -> Callable[[], float]:
    return lambda: difference(held(case, **options, **signals()), theirs("lp_reg", case))


def holds_the_same() -> float:
    """Infinite where scope: microbatch selects another token; the loss differs by the counts of the parts."""
    case = "proxy of the live policy, ragged"
    mine = held(case, local=None, **signals_of("live"))
    return 0.0 if torch.equal(mine["selected"], theirs("lp_reg", case)["selected"]) else math.inf


def proxy_difference() -> float:
    """Of the log-prob of the min-p filtered policy; infinite where the filter keeps another token."""
    found = 0.0
    for name, stored in load("lp_reg")["proxy"].items():
        logits, min_p = name.split()
        mine, other = signals_of(logits, float(min_p)), torch.tensor(stored, dtype=torch.float64)
        left = mine["logprobs"] >= mine["max_logprobs"] + math.log(float(min_p))
        if not torch.equal(left, other > -1e3):
            return math.inf
        found = max(found, apart((mine["logprobs"] - mine["log_kept_mass"])[left], other[left]))
    return found


# -- KL ----------------------------------------------------------------------------------------------------------------


def kl(estimator: str, theirs_is: str, far: bool) -> tuple[str, Callable[[], float]]:
    """The penalty alone: without advantages there is no policy term."""
    case = f"kl {theirs_is}{' far' if far else ''}"
    nothing = torch.zeros_like(tensors("far_ref" if far else "main")["mask"])
    return case, _loss("verl", case, KLPenalty(1.0, estimator), advantages=nothing)


KINDS = (("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3_straight_through", "k3+"))

# -- advantages --------------------------------------------------------------------------------------------------------


def advantage(source: str, case: str, estimator: Callable[..., Tensor], **settings: Any) -> Callable[[], float]:
    def found() -> float:
        stored = load(source)["advantages"][case]
        given = load("inputs")["rewards"][stored["rewards"]]
        rewards = torch.tensor(given["rewards"])
        return apart(estimator(rewards, torch.tensor(given["ids"]), **settings), stored["advantages"])

    return found


# -- covariances -------------------------------------------------------------------------------------------------------


def covariance(share: float) -> tuple[ClipCov, ClipHigher]:
    """Clip-Cov as it was recorded, and its clip."""
    return ClipCov(share=share, low=0.2, high=1.5, clip_low=0.2, clip_high=0.28), WIDER


def dropped(terms: Terms) -> Tensor:
    assert terms.weight is not None
    return terms.weight == 0


def penalised(terms: Terms) -> Tensor:
    (penalty,) = terms.penalties.values()
    assert penalty.where is not None
    return penalty.where


def drawn(case: str, every: str, share: float) -> float:
    """Infinite where another number of tokens is drawn, or one that is no candidate of theirs."""
    mine = ours(compose(*covariance(share)), "verl", case, selected=dropped)["selected"]
    there, candidates = theirs("verl", case)["selected"], theirs("verl", every)["selected"]
    return 0.0 if mine.sum() == there.sum() and not (mine & ~candidates).any() else math.inf


# -- corrections -------------------------------------------------------------------------------------------------------


def corrected(mode: str, **settings: Any) -> dict[str, Callable[[], float]]:
    """TRL's weights by an engine, without and with a lower bound."""
    sides = {"truncate": ("min_weight", "max_weight"), "mask": ("keep_low", "keep_high")}[mode.split("_")[1]]
    return {
        f"{mode} {low}": _loss(
            "trl",
            f"{mode} {low}",
            ImportanceCorrection(**{"max_weight": None} | dict(zip(sides, (low, 2.0), strict=True)) | settings),
            WIDER,
        )
        for low in (None, 0.6)
    }


def scaled(case: str) -> float:
    """The factor on the learning rate, which is the share itself at ``power`` 1."""
    stored = load("vcpo")["shares"][case]
    values = tensors(stored["inputs"])
    batch = TokenBatch.from_padded(
        response_mask=values["mask"],
        advantages=values["advantages"],
        old_logprobs=values["old"],
        rollout_logprobs=values["rollout" if stored["anchor"] == "rollout" else "old"],
        logprobs=values["live"],
    )
    plan = make_plan(ESSScale(power=1.0, anchor=stored["anchor"]), [batch])
    scale = plan.loss(batch, PolicyOutputs.from_padded(batch, logprobs=values["live"].requires_grad_())).lr_scale
    return apart(scale, stored["ess_ratio"])


def rejecting(level: str, low: float | None = None, high: float | None = None, **settings: Any) -> ImportanceCorrection:
    """No weights: what is rejected leaves the divisor."""
    settings |= {"min_weight": 1.0, "max_weight": 1.0, "denominator": "kept"}
    return ImportanceCorrection(level=level, keep_low=low, keep_high=high, **settings)


def of_engine(case: str, *methods: Any, **options: Any) -> dict[str, Callable[[], float]]:
    """verl's loss under a rollout correction."""
    return {case: _loss("verl", f"correction: {case}", *methods, VERL, **options)}


#: verl bounds the inverse ratio.
GEOMETRIC = rejecting("geometric", 1 / 1.25, 1 / 0.8)

# -- the table ---------------------------------------------------------------------------------------------------------

AGREEMENTS = (
    Agreement(
        "STARE, O1",
        "stare",
        "stare",
        "compute_policy_loss_stare",
        "`stare`, `clip_higher` (dual clip 10); scope: microbatch, refresh: step",
        {f"O1 {cut}": stare(f"O1 {cut}") for cut in ("whole", "halves", "ragged")},
    ),
    Agreement(
        "STARE, C2",
        "stare",
        "stare",
        "compute_policy_loss_stare",
        "the same, `variant: C2`; also share 0.35, W 1.5, M 0.5, and a closed gate",
        {f"C2 {cut}": stare(f"C2 {cut}", variant="C2") for cut in ("whole", "halves", "ragged")}
        | {
            "C2 wide": stare("C2 wide", variant="C2", share=0.35, boost=1.5, damp=0.5),
            "C2 gate closed": _loss("stare", "C2 gate closed", STARE(variant="C2", target_entropy=0.0), VERL),
        },
    ),
    Agreement(
        "STARE as its actor averages",
        "stare",
        "stare",
        "compute_policy_loss_stare, each part divided by its own tokens",
        "each micro-batch as an optimizer step of its own, weighted by its share of the rows",
        {"O1 ragged, local": _loss("stare", "O1 ragged, local", STARE(target_entropy=99.0), VERL, local=by_rows)},
    ),
    Agreement(
        "STARE, gate and gains",
        "stare",
        "stare",
        "STAREController, agg_loss",
        "`stare` at increment 0, 0.01 and 0.25 over ten optimizer steps, gains compared one later",
        {name: functools.partial(controlled, name) for name in ("fixed", "adaptive", "steep")}
        | {"mean entropy": lambda: apart(mean_entropy(), load("stare")["mean_entropy"]["token-mean"])},
        of="gate, gains, entropy",
    ),
    Agreement(
        "Lp-Reg, min-p proxy",
        "lp_reg",
        "lp_reg",
        "DataParallelPPOActor.apply_min_p",
        "`token_signals_from_logits`: `logprobs` - `log_kept_mass`, at min-p 0.02 and 0.1",
        {"proxy": proxy_difference},
        of="log-probs",
    ),
    Agreement(
        "Lp-Reg, on-policy",
        "lp_reg",
        "lp_reg",
        "compute_policy_loss_lp_reg",
        "`lp_reg` (form: code, ratio_cap: 10); each micro-batch as an optimizer step of its own, weighted by its share "
        "of the rows and n / (n + 1e-8); the live policy is the old one",
        {
            name: _lp_reg(name, lambda: signals_of("old"), live=OLD)
            for name in ("on-policy whole", "on-policy halves", "on-policy ragged", "on-policy, published share")
        }
        | {
            "on-policy, min-p 0.1": _lp_reg("on-policy, min-p 0.1", lambda: signals_of("old", 0.1), live=OLD, min_p=0.1)
        },
    ),
    Agreement(
        "Lp-Reg, off-policy",
        "lp_reg",
        "lp_reg",
        "compute_policy_loss_lp_reg",
        "the same with refresh: step and the proxy of the live policy; with their proxy handed in as signals; the "
        "selection also with scope: microbatch",
        {
            name: _lp_reg(name, lambda: signals_of("live"))
            for name in (f"proxy of the live policy, {cut}" for cut in ("whole", "halves", "ragged"))
        }
        | {
            "proxy handed in": _lp_reg("proxy handed in", lambda: handed_in("proxy")),
            "one token": _lp_reg("one token", lambda: handed_in("equal_surprisal")),
            "selection, scope: microbatch": holds_the_same,
        },
    ),
    Agreement(
        "20-Entropy (TRL)",
        "trl",
        "top_entropy",
        "GRPOTrainer.get_high_entropy_mask, _compute_loss",
        "`top_entropy` (denominator: all), `clip_higher`; scope: microbatch, refresh: step; also share 0.35 with "
        "`sequence_mean`, and with `kl`",
        {
            f"top entropy {cut}": _loss("trl", f"top entropy {cut}", TRL_TOP, WIDER, selected=weighted)
            for cut in ("whole", "halves", "ragged")
        }
        | {
            "top entropy, grpo": _loss(
                "trl",
                "top entropy, grpo",
                TopEntropyMask(share=0.35, denominator="all"),
                WIDER,
                SequenceMean(),
                selected=weighted,
            ),
            "top entropy and kl": _loss("trl", "top entropy and kl", TRL_TOP, WIDER, KLPenalty(0.04, cap=None)),
            "equal entropies": _loss("trl", "equal entropies", TRL_TOP, WIDER, selected=weighted),
        },
    ),
    Agreement(
        "20-Entropy (Lp-Reg's code)",
        "lp_reg",
        "top_entropy",
        "compute_policy_loss_8020_split",
        "`top_entropy`, `clip_higher`, on a number of tokens divisible by 5, weighted as above",
        {
            "8020_split whole": _loss(
                "lp_reg", "8020_split whole", TopEntropyMask(), WIDER, local=by_rows_added, selected=kept
            )
        },
    ),
    Agreement(
        "clip-higher (TRL)",
        "trl",
        "clip_higher",
        "GRPOTrainer._compute_loss",
        "`clip_higher` without dual clip; also 0.2 both ways, and the live policy as its own denominator",
        {
            "dapo whole": _loss("trl", "dapo whole", WIDER),
            "symmetric clip": _loss("trl", "symmetric clip", ClipHigher(high=0.2)),
            "on-policy": _loss("trl", "on-policy", WIDER, SequenceMean(), live_ratio=True),
        },
    ),
    Agreement(
        "two-sided clip (TRL delta)",
        "trl",
        "clip_higher",
        "GRPOTrainer._compute_loss with delta",
        "`clip_higher` (dual clip delta) for delta 3 and 1.8, which are above 1 + high; for 1.1, which is below, "
        "`clip_higher` (high 0.1, dual clip 1.28)",
        {
            "delta None": _loss("trl", "delta None", WIDER),
            "delta 3.0": _loss("trl", "delta 3.0", ClipHigher(dual_clip=3.0)),
            "delta 1.8": _loss("trl", "delta 1.8", ClipHigher(dual_clip=1.8)),
            "delta 1.1": _loss("trl", "delta 1.1", ClipHigher(high=0.1, dual_clip=1.28)),
        },
    ),
    Agreement(
        "clip-higher, dual clip (verl)",
        "verl",
        "clip_higher",
        "compute_policy_loss_vanilla",
        "`clip_higher` (0.2, 0.28, dual clip 10), (0.2, 0.2, 3); log-ratios of 25",
        {
            "dual clip 10": _loss("verl", "dual clip 10", VERL),
            "dual clip 3": _loss("verl", "dual clip 3", ClipHigher(high=0.2, dual_clip=3.0)),
            "extreme": _loss("verl", "extreme", VERL),
            "extreme, dual clip out of reach": _loss(
                "verl", "extreme, dual clip out of reach", ClipHigher(dual_clip=1e12)
            ),
        },
    ),
    Agreement(
        "dual clip (verl), float32",
        "verl",
        "clip_higher",
        "compute_policy_loss_vanilla",
        "`clip_higher` (dual clip 10) in float32",
        {"dual clip 10, float32": _loss("verl", "dual clip 10, float32", VERL)},
        SINGLE,
    ),
    Agreement(
        "GSPO (TRL)",
        "trl",
        "gspo",
        "GRPOTrainer._compute_loss, importance_sampling_level sequence",
        "`gspo`, `clip_higher` (0.1, 0.15), `sequence_mean` (loss_type grpo), `token_mean` (dapo), `constant_length` "
        "of 1 (luspo)",
        {
            "grpo, sequence": _loss("trl", "grpo, sequence", GSPO(), SEQUENCE, SequenceMean()),
            "grpo, sequence, halves": _loss("trl", "grpo, sequence, halves", GSPO(), SEQUENCE, SequenceMean()),
            "dapo, sequence": _loss("trl", "dapo, sequence", GSPO(), SEQUENCE, TokenMean()),
            "luspo, sequence": _loss("trl", "luspo, sequence", GSPO(), SEQUENCE, ConstantLength(length=1)),
        },
    ),
    Agreement(
        "GSPO (verl)",
        "verl",
        "gspo",
        "compute_policy_loss_gspo",
        "`gspo`, `clip_higher` (0.1, 0.15) with `sequence_mean`, with `token_mean`",
        {
            "gspo": _loss("verl", "gspo", GSPO(), SEQUENCE, SequenceMean()),
            "gspo ragged": _loss("verl", "gspo ragged", GSPO(), SEQUENCE, SequenceMean()),
            "gspo, token-mean": _loss("verl", "gspo, token-mean", GSPO(), SEQUENCE, TokenMean()),
        },
        ADDED,
    ),
    Agreement(
        "GMPO (verl)",
        "verl",
        "gmpo",
        "compute_policy_loss_geo_mean",
        "`gmpo` (0.4, 0.4), (0.1, 0.3), `sequence_mean`; theirs adds 1e-8 to a length twice",
        {
            "geo_mean": _loss("verl", "geo_mean", GMPO(), SequenceMean()),
            "geo_mean ragged": _loss("verl", "geo_mean ragged", GMPO(low=0.1, high=0.3), SequenceMean()),
        },
        2 * ADDED,
    ),
    Agreement(
        "CISPO (TRL)",
        "trl",
        "cispo",
        "GRPOTrainer._compute_loss, loss_type cispo",
        "`cispo` (cap: epsilon_high), also with the ratio of `gspo`",
        {
            "cispo": _slope("trl", "cispo", CISPO(cap=1.28)),
            "cispo ragged": _slope("trl", "cispo ragged", CISPO(cap=5.0)),
            "cispo, sequence": _slope("trl", "cispo, sequence", GSPO(), CISPO(cap=1.15)),
        },
        of="gradient",
    ),
    Agreement(
        "CISPO (verl)",
        "verl",
        "cispo",
        "compute_policy_loss_cispo",
        "`cispo` (cap: 1 + clip_ratio_high, floor: 1 - clip_ratio_low, null where that is 0)",
        {
            "cispo": _slope("verl", "cispo", CISPO(cap=1.28, floor=0.8)),
            "cispo ragged": _slope("verl", "cispo ragged", CISPO(cap=1.28, floor=0.8)),
            "cispo, no floor": _slope("verl", "cispo, no floor", CISPO(cap=5.0)),
        },
        of="gradient",
    ),
    Agreement(
        "SAPO (TRL)",
        "trl",
        "sapo",
        "GRPOTrainer._compute_loss, loss_type sapo",
        "`sapo`, `sequence_mean`, also with the ratio of `gspo`; 1.05 as the float32 that it is there",
        {
            "sapo": _slope("trl", "sapo", SAPO(negative=NEGATIVE), SequenceMean()),
            "sapo halves": _slope("trl", "sapo halves", SAPO(positive=2.0, negative=3.0), SequenceMean()),
            "sapo, sequence": _slope("trl", "sapo, sequence", GSPO(), SAPO(negative=NEGATIVE), SequenceMean()),
        },
        of="gradient",
    ),
    Agreement(
        "SAPO (verl)",
        "verl",
        "sapo",
        "compute_policy_loss_sapo",
        "`sapo`, `sequence_mean`",
        {
            "sapo": _slope("verl", "sapo", SAPO(), SequenceMean()),
            "sapo ragged": _slope("verl", "sapo ragged", SAPO(positive=2.0, negative=3.0), SequenceMean()),
        },
        ADDED,
        "gradient",
    ),
    Agreement(
        "DPPO (verl)",
        "verl",
        "dppo",
        "compute_policy_loss_dppo_tv, compute_policy_loss_dppo_kl",
        "`dppo` (tv, kl; thresholds 0.15, and 0.05 and 0.02; caps 20 and 1.7), anchor: old, and anchor: rollout with "
        "the same log-probs",
        {
            f"{case}, {anchor}": _slope(
                "verl",
                case,
                DPPO(divergence=divergence, low=low, high=high, cap=cap, anchor=anchor),
                **(
                    {"rollout": tensors("main" if "ragged" in case else "ratios")["old"]} if anchor == "rollout" else {}
                ),
            )
            for divergence in ("tv", "kl")
            for case, low, high, cap, sampler in (
                (f"dppo_{divergence} 0.15, 0.15", 0.15, 0.15, 20.0, RATIOS_OLD),
                (f"dppo_{divergence} 0.05, 0.02", 0.05, 0.02, 20.0, RATIOS_OLD),
                (f"dppo_{divergence}, ratios up to 1.7", 0.15, 0.15, 1.7, RATIOS_OLD),
                (f"dppo_{divergence} ragged", 0.05, 0.02, 20.0, OLD),
            )
            for anchor in ("old", "rollout")
        },
        of="gradient",
    ),
    Agreement(
        "MASPO",
        "maspo",
        "maspo",
        "compute_policy_loss, ratio_mode maspo",
        "`maspo`, also narrower, and with scales that reach their bounds",
        {
            case: _loss("maspo", case, method)
            for case, method in (
                ("ratios", MASPO()),
                ("main", MASPO()),
                ("narrow", MASPO(sigma=0.2, alpha=0.6, max_sigma=0.5, positive=0.4, negative=0.5)),
                ("scales reached", MASPO(sigma=0.3, positive=0.9, negative=2.0, min_scale=0.5, max_scale=1.5)),
            )
        },
    ),
    Agreement(
        "CE-GPPO",
        "ce_gppo",
        "ce_gppo",
        "compute_gppo_loss_general_beta",
        "`ce_gppo` (high: 0.28, dual clip 10, which no ratio reaches); n / (n + 1e-8)",
        {"0.75, 1": _loss("ce_gppo", "0.75, 1", CEGPPO(high=0.28, dual_clip=10.0), local=by_rows_added)},
    ),
    Agreement(
        "CE-GPPO beyond the dual clip",
        "ce_gppo",
        "ce_gppo",
        "compute_gppo_loss_general_beta",
        "the same, pulls of 0.5 and 1, of 0.25 and 0.6, dual clip 10 and 3",
        {
            "0.5, 1, main": _slope(
                "ce_gppo", "0.5, 1, main", CEGPPO(high=0.28, pull_low=0.5, dual_clip=10.0), local=by_rows_added
            ),
            "0.25, 0.6, dual clip 3": _slope(
                "ce_gppo",
                "0.25, 0.6, dual clip 3",
                CEGPPO(high=0.28, pull_low=0.25, pull_high=0.6, dual_clip=3.0),
                local=by_rows_added,
            ),
        },
        of="gradient",
    ),
    Agreement(
        "DCPO, its clip",
        "dcpo",
        "dcpo_clip",
        "compute_policy_loss_dcpo, get_clip_low_high",
        "`dcpo_clip` (0.16, 0.2), (0.04, 0.05), dual clip 10 and 3; n / (n + 1e-8)",
        {
            "0.16, 0.2": _loss("dcpo", "0.16, 0.2", DCPOClip(), local=by_rows_added),
            "0.16, 0.2, main": _loss("dcpo", "0.16, 0.2, main", DCPOClip(), local=by_rows_added),
            "0.04, 0.05": _loss("dcpo", "0.04, 0.05", DCPOClip(low=0.04, high=0.05), local=by_rows_added),
            "dual clip 3": _loss(
                "dcpo", "dual clip 3", DCPOClip(low=0.04, high=0.05, dual_clip=3.0), local=by_rows_added
            ),
        },
    ),
    Agreement(
        "VESPO (TRL)",
        "trl",
        "vespo",
        "GRPOTrainer._compute_loss, get_gamma_weights, loss_type vespo",
        "`vespo`, also powers of 1 and 0.5 and decays of 1.5 and 0.25; anchor: rollout, where theirs does not truncate "
        "the weights of the engine",
        {
            "vespo": _slope("trl", "vespo", VESPO(anchor="old")),
            "vespo ragged": _slope(
                "trl",
                "vespo ragged",
                VESPO(positive_power=1.0, positive_decay=1.5, negative_power=0.5, negative_decay=0.25),
            ),
            "vespo, engine": _slope("trl", "vespo, engine", VESPO(anchor="rollout")),
        },
        of="gradient",
    ),
    Agreement(
        "DRPO",
        "drpo",
        "drpo",
        "_drpo_loss",
        "`drpo` (delta: 12.5, 0.15; anchor: old)",
        {
            case: _slope("drpo", case, DRPO(delta=delta, anchor="old"))
            for case, delta in (("12.5", 12.5), ("12.5, main", 12.5), ("0.15", 0.15))
        },
        of="gradient",
    ),
    Agreement(
        "CPPO",
        "cppo",
        "cppo",
        "_cppo_loss, _cppo_mask",
        "`cppo` (anchor: old; delta: 0.15, 0.2), also min_weight 0.6 and 0.2 with min_budget 0.1 and 0.15",
        {
            case: _loss("cppo", case, method)
            for case, method in (
                ("0.2", CPPO(delta=0.2, anchor="old")),
                ("0.15", CPPO(anchor="old")),
                ("0.15, main", CPPO(anchor="old")),
                ("0.2, floor 0.6", CPPO(delta=0.2, min_weight=0.6, min_budget=0.1, anchor="old")),
                ("0.1, floor 0.2", CPPO(delta=0.1, min_weight=0.2, min_budget=0.15, anchor="old")),
            )
        },
    ),
    Agreement(
        "Holder mean",
        "holder",
        "holder_mean",
        "ZeroMathLearner.learning_step, critic_type_modify holder",
        "`holder_mean` at a power of 2, 1, 0 and -2, `clip_higher` (0.2, 0.2), `sequence_mean`; theirs adds 1e-8 to a "
        "length, and the loss is a sum of larger terms that cancel",
        {
            case: _loss(
                "holder",
                case,
                HolderMean(power=power, final_power=power),
                ClipHigher(high=0.2),
                SequenceMean(),
            )
            for case, power in (("2", 2.0), ("1", 1.0), ("0", 0.0), ("-2", -2.0), ("2, main", 2.0))
        },
        10 * ADDED,
    ),
    Agreement(
        "ASPO",
        "aspo",
        "aspo",
        "compute_policy_loss_archer",
        "`aspo`, refresh: step; also a room of 0.9 for tokens of high entropy, one of 0.2 for all, and a cap of 1.2",
        {
            case: _slope("aspo", case, ASPO(room_high_entropy=room, cap=cap))
            for case, room, cap in (
                ("two rooms", 0.4, 3.0),
                ("two rooms, main", 0.4, 3.0),
                ("two rooms far apart", 0.9, 3.0),
                ("one room", 0.2, 3.0),
                ("one room, main", 0.2, 3.0),
                ("one room, cap 1.2", 0.2, 1.2),
            )
        },
        of="gradient",
    ),
    Agreement(
        "Clip-Cov (verl)",
        "verl",
        "clip_cov",
        "compute_policy_loss_clip_cov",
        "`clip_cov` (low: 0.2, high: 1.5, share: 1, which takes every candidate), `clip_higher`; scope: microbatch, "
        "refresh: step; at share 0.05 and 0.1 as many tokens, all of them candidates",
        {
            case: _loss("verl", case, *covariance(1.0), selected=dropped)
            for case in ("clip_cov, all candidates", "clip_cov, all candidates, ragged")
        }
        | {
            "clip_cov": lambda: drawn("clip_cov", "clip_cov, all candidates", 0.05),
            "clip_cov ragged": lambda: drawn("clip_cov ragged", "clip_cov, all candidates, ragged", 0.1),
        },
    ),
    Agreement(
        "KL-Cov (verl)",
        "verl",
        "kl_cov",
        "compute_policy_loss_kl_cov",
        "`kl_cov` (coefficient: 0.7; share: 0.1, 0.2, 2e-4); scope: microbatch, refresh: step",
        {
            case: _loss("verl", case, KLCov(share=share, coefficient=0.7), selected=penalised)
            for case, share in (("kl_cov", 0.1), ("kl_cov ragged", 0.2), ("kl_cov, one", 2e-4))
        },
    ),
    Agreement(
        "off-policy mask (TRL)",
        "trl",
        "off_policy_mask",
        "GRPOTrainer.get_off_policy_mask, _compute_loss",
        "`off_policy_mask` (max_gap: 0.05, 0.1; anchor: old), `clip_higher`; anchor: rollout where an engine samples, "
        "with `sequence_mean`",
        {
            "off-policy mask": _loss("trl", "off-policy mask", OffPolicyMask(max_gap=0.05, anchor="old"), WIDER),
            "off-policy mask ragged": _loss(
                "trl", "off-policy mask ragged", OffPolicyMask(max_gap=0.1, anchor="old"), WIDER
            ),
            "off-policy mask, engine": _loss(
                "trl",
                "off-policy mask, engine",
                OffPolicyMask(max_gap=0.05, anchor="rollout"),
                WIDER,
                SequenceMean(),
            ),
        },
    ),
    Agreement(
        "truncated responses (TRL)",
        "trl",
        "truncated_mask",
        "GRPOTrainer._generate_and_score_completions, _compute_loss with mask_truncated_completions",
        "`truncated_mask`, `clip_higher`, `token_mean` (loss_type dapo)",
        {"truncated, dapo": _loss("trl", "truncated, dapo", TruncatedMask(), WIDER, truncated=CUT_OFF)},
    ),
    Agreement(
        "importance weights of an engine (TRL)",
        "trl",
        "importance_correction",
        "GRPOTrainer._generate_and_score_completions, _compute_loss: four vllm_importance_sampling_mode",
        "`importance_correction` (token, sequence; max_weight: 2, or keep_high: 2 without it), `clip_higher`; also a "
        "lower bound of 0.6",
        corrected("token_truncate")
        | corrected("token_mask")
        | corrected("sequence_truncate", level="sequence")
        | corrected("sequence_mask", level="sequence"),
    ),
    Agreement(
        "importance weights of an engine (verl)",
        "verl",
        "importance_correction",
        "compute_rollout_correction_weights, compute_policy_loss_vanilla",
        "`importance_correction` (TIS and IcePop, of tokens and of sequences), `clip_higher` (dual clip 10)",
        of_engine("token, at most 2", ImportanceCorrection(), selected=weighted)
        | of_engine(
            "token, 0.5 to 2", ImportanceCorrection(max_weight=None, keep_low=0.5, keep_high=2.0), selected=weighted
        )
        | of_engine("sequence, at most 2", ImportanceCorrection(level="sequence"), selected=weighted)
        | of_engine(
            "sequence, 0.3 to 2",
            ImportanceCorrection(level="sequence", max_weight=None, keep_low=0.3, keep_high=2.0),
            selected=weighted,
        ),
    ),
    Agreement(
        "normalised importance weights (verl)",
        "verl",
        "importance_correction",
        "compute_rollout_correction_weights with rollout_is_batch_normalize",
        "the same with `normalize`; theirs adds 1e-8 to the counts of the mean",
        of_engine("token, normalized", ImportanceCorrection(normalize=True))
        | of_engine("sequence, normalized", ImportanceCorrection(level="sequence", normalize=True)),
        ADDED,
    ),
    Agreement(
        "rejection by an engine (verl)",
        "verl",
        "importance_correction",
        "compute_rollout_rejection_mask, compute_policy_loss_vanilla: token_k1, seq_sum_k1, seq_mean_k1, seq_max_k2",
        "`importance_correction` (denominator: kept; bounds of the inverse ratio) of tokens, of sequences, geometric, "
        "also beside weights, and veto: e^-2 for seq_max_k2 of 2",
        of_engine("tokens kept", rejecting("token", 1 / 3.0, 1 / 0.5), selected=kept)
        | of_engine("sequences kept", rejecting("sequence", 1 / 4.0, 1 / 0.4), selected=kept)
        | of_engine("geometric, kept", GEOMETRIC, selected=kept)
        | of_engine("geometric, kept, with token weights", GEOMETRIC, ImportanceCorrection(), selected=kept)
        | of_engine("veto", rejecting("token", veto=math.exp(-2.0)), selected=kept),
    ),
    Agreement(
        "effective sample size (VCPO)",
        "vcpo",
        "ess_scale",
        "compute_global_ess_ratio",
        "`ess_scale` (power: 1; anchor: old, rollout); theirs adds 1e-8 to the sum of squares",
        {case: functools.partial(scaled, case) for case in ("ratios, old", "ratios, rollout", "main, old")},
        ADDED,
        "learning rate",
    ),
    Agreement(
        "STEER",
        "steer",
        "steer",
        "compute_policy_loss_with_entropy, compute_token_weights",
        "`steer` (linear, exponential; also low 0.3), `clip_higher` (dual clip 10); scope: microbatch, "
        "refresh: step; float32",
        {
            case: _loss("steer", case, method, VERL)
            for case, method in (
                ("linear", STEER(form="linear")),
                ("linear, main", STEER(form="linear")),
                ("linear, 0.3 to 2", STEER(form="linear", low=0.3, high=2.0)),
                ("linear, ragged", STEER(form="linear")),
                ("exponential", STEER()),
                ("exponential, 0.3", STEER(low=0.3)),
            )
        },
        5 * SINGLE,
    ),
    Agreement(
        "FIPO (ms-swift)",
        "fipo",
        "fipo",
        "GRPOTrainer._compute_fipo_influence",
        "`fipo`, `clip_higher` with a dual clip of its max_ratio; also half-life 2, and factors from 0.8 and 0.1",
        {
            case: _loss("fipo", case, method, ClipHigher(dual_clip=method.max_ratio))
            for case, method in (
                ("half-life 32", FIPO()),
                ("half-life 2", FIPO(half_life=2.0, max_ratio=3.0, safe_ratio=1.8)),
                ("half-life 2, 0.8 to 1.2", FIPO(half_life=2.0, max_ratio=3.0, safe_ratio=1.8, low=0.8)),
                ("half-life 2, 0.1 to 1.9", FIPO(half_life=2.0, max_ratio=3.0, safe_ratio=4.5, low=0.1, high=1.9)),
            )
        },
    ),
    Agreement(
        "AR",
        "ar",
        "ar",
        "compute_reweight_advantage (both_linear_normal), compute_policy_loss",
        "`ar` (alpha: 0.3, 0.8), `clip_higher` (0.2, 0.24, dual clip 3)",
        {
            case: _loss("ar", case, AR(alpha=alpha), ClipHigher(high=0.24, dual_clip=3.0))
            for case, alpha in (("0.3", 0.3), ("0.3, main", 0.3), ("0.8", 0.8))
        },
    ),
    Agreement(
        "policy gradient (verl gpg)",
        "verl",
        "token_mean",
        "compute_policy_loss_gpg",
        "`token_mean` alone, the live policy being its own denominator",
        {"gpg": _slope("verl", "gpg", TokenMean(), live_ratio=True)},
        of="gradient",
    ),
    Agreement(
        "token mean (verl token-mean)",
        "verl",
        "token_mean",
        "agg_loss",
        "`token_mean`; with the counts of the micro-batch alone, each micro-batch as an optimizer step of its own",
        {
            "token-mean whole": _loss("verl", "token-mean whole", VERL, TokenMean()),
            "token-mean ragged": _loss("verl", "token-mean ragged", VERL, TokenMean()),
            "token-mean ragged, local": _loss("verl", "token-mean ragged, local", VERL, TokenMean(), local=by_rows),
        },
    ),
    Agreement(
        "sequence mean (verl seq-mean-token-mean)",
        "verl",
        "sequence_mean",
        "agg_loss",
        "`sequence_mean`",
        {
            "seq-mean-token-mean ragged": _loss("verl", "seq-mean-token-mean ragged", VERL, SequenceMean()),
            "seq-mean-token-mean ragged, local": _loss(
                "verl", "seq-mean-token-mean ragged, local", VERL, SequenceMean(), local=by_rows
            ),
            "empty row": _loss("verl", "empty row", VERL, SequenceMean()),
        },
        ADDED,
    ),
    Agreement(
        "constant length (verl seq-mean-token-sum-norm, seq-mean-token-sum)",
        "verl",
        "constant_length",
        "agg_loss",
        "`constant_length` of the scale factor; of the padded width, where none is given; of 1",
        {
            "seq-mean-token-sum-norm ragged": _loss(
                "verl", "seq-mean-token-sum-norm ragged", VERL, ConstantLength(length=LENGTH)
            ),
            "seq-mean-token-sum-norm, no factor": _loss(
                "verl", "seq-mean-token-sum-norm, no factor", VERL, ConstantLength(length=9)
            ),
            "seq-mean-token-sum ragged": _loss("verl", "seq-mean-token-sum ragged", VERL, ConstantLength(length=1)),
        },
    ),
    Agreement(
        "constant length (Dr. GRPO)",
        "dr_grpo",
        "constant_length",
        "masked_sum with constant_normalizer",
        "`constant_length`",
        {"constant": _loss("dr_grpo", "constant", ConstantLength(length=LENGTH))},
    ),
    Agreement(
        "aggregation (TRL grpo, dr_grpo, dapo)",
        "trl",
        "sequence_mean",
        "GRPOTrainer._compute_loss",
        "`sequence_mean`, `constant_length`, `token_mean`, each with `clip_higher`; parts of equal rows for the first "
        "two, any for dapo",
        {f"grpo {cut}": _loss("trl", f"grpo {cut}", WIDER, SequenceMean()) for cut in ("whole", "halves")}
        | {
            f"dr_grpo {cut}": _loss("trl", f"dr_grpo {cut}", WIDER, ConstantLength(length=LENGTH))
            for cut in ("whole", "halves")
        }
        | {f"dapo {cut}": _loss("trl", f"dapo {cut}", WIDER, TokenMean()) for cut in ("whole", "halves", "ragged")},
    ),
    Agreement(
        "aggregation (TRL bnpo)",
        "trl",
        "token_mean",
        "GRPOTrainer._compute_loss",
        "`token_mean`, each micro-batch as an optimizer step of its own, averaged",
        {
            f"bnpo {cut}": _loss("trl", f"bnpo {cut}", WIDER, TokenMean(), local=by_parts)
            for cut in ("whole", "halves", "ragged")
        },
    ),
    Agreement(
        "KL k1, k2, k3, straight-through (verl)",
        "verl",
        "kl",
        "kl_penalty",
        "`kl` of that estimator, cap 10; also d = 25 and -25",
        dict(kl(here, there, far) for here, there in KINDS for far in (False, True)),
    ),
    Agreement(
        "KL k3 (TRL)",
        "trl",
        "kl",
        "GRPOTrainer._compute_loss",
        "`kl` (coefficient: 0.04, cap: null), `clip_higher`",
        {"kl": _loss("trl", "kl", WIDER, KLPenalty(0.04, cap=None))},
    ),
    Agreement(
        "KL k3 times the ratio, TRL's default (TRL)",
        "trl",
        "kl",
        "GRPOTrainer._compute_loss",
        "`kl` (coefficient: 0.04, estimator: k3_unbiased, cap: null), `clip_higher`",
        {
            "off-policy": _loss("trl", "kl, TRL's default", WIDER, UNBIASED_KL),
            "on-policy": _loss("trl", "kl, TRL's default, on-policy", WIDER, UNBIASED_KL, live_ratio=True),
        },
    ),
    Agreement(
        "advantages (verl grpo, grpo without std, rloo)",
        "verl",
        "advantages",
        "compute_grpo_outcome_advantage, compute_rloo_outcome_advantage, compute_rloo_vectorized_outcome_advantage",
        "`grpo` (epsilon 1e-6), `dr_grpo`, `rloo`; theirs in float32",
        {
            "grpo": advantage("verl", "grpo, groups", estimators.grpo, epsilon=1e-6),
            "grpo without std": advantage("verl", "grpo without std, groups", estimators.dr_grpo),
            "rloo": advantage("verl", "rloo, groups", estimators.rloo),
            "rloo_vectorized": advantage("verl", "rloo_vectorized, groups", estimators.rloo),
        },
        SINGLE,
        "advantages",
    ),
    Agreement(
        "advantages (TRL scale_rewards group, none)",
        "trl",
        "advantages",
        "GRPOTrainer._generate_and_score_completions",
        "`grpo`, `dr_grpo`; theirs in float32",
        {
            "group": advantage("trl", "group", estimators.grpo),
            "none": advantage("trl", "none", estimators.dr_grpo),
        },
        SINGLE,
        "advantages",
    ),
    Agreement(
        "advantages (Dr. GRPO drgrpo, grpo)",
        "dr_grpo",
        "advantages",
        "ZeroMathLearner.compute_monte_carlo_advantages",
        "`dr_grpo`, `grpo` (epsilon 1e-8); theirs in float32",
        {
            "drgrpo": advantage("dr_grpo", "drgrpo", estimators.dr_grpo),
            "grpo": advantage("dr_grpo", "grpo", estimators.grpo, epsilon=1e-8),
        },
        SINGLE,
        "advantages",
    ),
)
