"""Was the loss what the trainer said? Its formula again, in float64, against what it backpropagated.

Where the two differ, they are compared again with one thing changed at a time, of the formula or of the tokens: each of
the known errors of trainers is such a change. Formulas are those of the hosts' own code at the releases that the
adapters are tested with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlstab.config import load_objective
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import make_plan
from rlstab.errors import RlstabError
from rlstab.estimators import k1, k2
from rlstab.replay.steps import Step

#: Two coefficients agree up to this share of the larger one, and this share of the largest of the step: float32.
RELATIVE, ABSOLUTE = 1e-4, 2e-6
#: Two losses of a micro-batch agree up to this share of what it would be if all advantages had one sign.
OF_MASS = 1e-5
#: So near to a bound of the clip rounding decides, and nothing is said of the token.
ON_BOUND = 1e-5
#: Mean of |log-ratio|, nats, up to which a policy that has not moved may seem to: bfloat16 on other batch shapes.
STILL = 0.01
#: Coefficients that are off by no more are so by half precision, perhaps: a log-prob of 8 nats in bfloat16.
HALF = 0.035
#: Tokens up to which changes and factors are tried together: beyond, it would take a minute.
FEW = 100_000
#: Factors of coefficients that differ by no more are the same.
ALIKE = 3e-4


@dataclass(frozen=True)
class Formula:
    """A policy-gradient loss, in the terms in which trainers differ.

    Attributes:
        mean: what the sum of a micro-batch is divided by: tokens of the optimizer step over all ranks (``step``), those
            of its rank (``rank``), tokens of the micro-batch (``part``), the tokens of each response and then responses
            (``response``), responses times a constant (``length``), or responses alone (``sum``). All but ``step`` and
            ``rank`` are averaged over the micro-batches of a rank; with ``whole``, over the responses of the step.
        low, high: of the clip range, from ``1 - low`` to ``1 + high``; None is no bound.
        cap: the ratio is never above it, before the clip (TRL's ``delta``).
        dual: with a negative advantage the loss is at most ``-A dual``.
        weight: the clipped ratio is a constant weight of the log-prob (CISPO).
        beta: coefficient of the KL term.
        estimator: of the KL term, ``k1``, ``k2``, ``k3`` or ``k3_unbiased``; with ``_reversed`` behind it, the two
            policies are exchanged.
        entropy: coefficient of the entropy bonus, a mean over the tokens of each micro-batch, or that of the loss.
        sequence: the ratio is the geometric mean over the response.
        counted: what a denominator of tokens counts: those in the loss (``mask``), with their prompts (``prompts``), or
            all places of the padded micro-batch (``padding``).
        length: the constant of ``length``.
        tokens: denominator of ``step``; None counts the tokens of the step.
        scale: multiplies the whole.
        objective: stands in place of all but the scale.
        state, scope: of the objective.
    """

    mean: str = "step"
    whole: bool = False
    low: float | None = 0.2
    high: float | None = 0.2
    cap: float | None = None
    dual: float | None = None
    weight: bool = False
    beta: float = 0.0
    estimator: str = "k3"
    entropy: float = 0.0
    sequence: bool = False
    counted: str = "mask"
    length: float = 1.0
    tokens: float | None = None
    scale: float = 1.0
    objective: TokenObjective | None = None
    state: State | None = None
    scope: Any = "step"


Settings = Mapping[str, Any]

#: What is taken from the settings of a host, by the names there: the first that is a number counts.
_TRL = {
    "low": ("epsilon",),
    "high": ("epsilon_high", "epsilon"),
    "cap": ("delta",),
    "beta": ("beta",),
    "entropy": ("entropy_coef",),
    "length": ("max_completion_length",),
    "tokens": ("tokens",),
}
_VERL = {
    "low": ("clip_ratio_low", "clip_ratio"),
    "high": ("clip_ratio_high", "clip_ratio"),
    "dual": ("clip_ratio_c",),
    "entropy": ("entropy_coeff",),
    "length": ("loss_scale_factor",),
    "tokens": ("tokens",),
}


def _number(settings: Settings, names: Sequence[str], default: Any = None) -> Any:
    """The first of some settings that is a number."""
    return next((float(settings[name]) for name in names if isinstance(settings.get(name), int | float)), default)


def _formula(settings: Settings, names: Mapping[str, Sequence[str]], **fixed: Any) -> Formula:
    given = {field: _number(settings, own, fixed.get(field, getattr(Formula, field))) for field, own in names.items()}
    return Formula(**{**fixed, **given})


def _trl(settings: Settings, mean: str, **fixed: Any) -> Formula:
    return _formula(
        settings,
        _TRL,
        mean=mean,
        estimator="k3_unbiased" if settings.get("use_bias_correction_kl", True) else "k3",
        sequence=settings.get("importance_sampling_level") == "sequence",
        **fixed,
    )


def _verl(settings: Settings) -> Formula:
    means = {"token-mean": "step", "seq-mean-token-mean": "response", "seq-mean-token-sum": "sum"}
    kinds = {"low_var_kl": "k3", "kl": "k1", "mse": "k2"}
    kind = str(settings.get("kl_loss_type", "k3"))
    return _formula(
        settings,
        _VERL | ({"beta": ("kl_loss_coef",)} if settings.get("use_kl_loss") else {}),
        mean=means.get(str(settings.get("loss_agg_mode", "token-mean")), "length"),
        whole=True,
        dual=3.0,
        estimator=kinds.get(kind, kind),
    )


def _prime(settings: Settings) -> Formula:
    bounds = {side: _number(settings, [f"dppo_mask_{side}"], 0.2) for side in ("low", "high")}
    tau = _number(settings, ["kl_tau"], 1e-3)
    penalty = {"name": "kl", "coefficient": 2 * tau, "estimator": "k2", "anchor": "rollout"}
    return Formula(objective=load_objective([{"name": "dppo", **bounds, "cap": 1e9}, penalty]))


def _rlstab(settings: Settings) -> Formula:
    """Of an objective; a dump never names code that is run."""
    if ".py:" in json.dumps(settings.get("objective")):
        raise RlstabError("its objective has methods of the user's own")
    objective = load_objective(settings.get("objective") or [])
    return Formula(objective=objective, state=settings.get("state"), scope=settings.get("scope", "step"))


#: The formulas that are known, by name.
FORMULAS: Mapping[str, Callable[[Settings], Formula]] = {
    "trl/grpo": partial(_trl, mean="response"),
    "trl/bnpo": partial(_trl, mean="part"),
    "trl/dr_grpo": partial(_trl, mean="length"),
    "trl/dapo": partial(_trl, mean="step"),
    "trl/luspo": partial(_trl, mean="sum"),
    "trl/cispo": partial(_trl, mean="step", weight=True),
    "verl/vanilla": _verl,
    "prime-rl/default": _prime,
    "rlstab": _rlstab,
}


def formula_of(step: Step) -> Formula | None:
    """What the trainer says that it minimises, None where that is not known here."""
    loss = step.header.loss
    if loss is None or loss.name not in FORMULAS:
        return None
    try:
        return FORMULAS[loss.name](loss.settings)
    except RlstabError:
        return None


# -- the loss again ----------------------------------------------------------------------------------------------------


def values_of(step: Step, formula: Formula, live: Tensor | None = None) -> Tensor:
    """``(P,)`` float64: what each micro-batch of a step backpropagates, over all ranks.

    The gradient of the step is that of their sum over the micro-batches of a rank, averaged over ranks.

    Args:
        step: of a dump.
        formula: of the loss.
        live: ``(N,)`` float64 log-probs of the live policy, to differentiate; None takes those of the dump.
    """
    live = _live(step) if live is None else live
    if formula.objective is not None:
        return formula.scale * step.header.ranks * _planned(step, formula, live)
    mask, rows = step.mask.double(), len(step.tensors["lengths"])
    ratio = _ratio(step, formula, live)
    loss = _policy_term(formula, ratio, step.tensors["advantages"].double(), live)
    loss = loss * step.tensors.get("weights", mask).double()
    if formula.beta and "ref_logprobs" in step.tensors:
        loss = loss + formula.beta * _kl(formula.estimator, step.tensors["ref_logprobs"].double() - live, ratio)
    values = _mean(step, formula, _summed(loss * mask, step.row, rows))
    if formula.entropy and "entropies" in step.tensors:
        own = formula if formula.whole else replace(formula, mean="part")
        values = values - formula.entropy * _mean(
            step, own, _summed(step.tensors["entropies"].double() * mask, step.row, rows)
        )
    return formula.scale * values


def _live(step: Step) -> Tensor:
    return step.tensors.get("live_logprobs", step.tensors["logprobs"]).double()


def _planned(step: Step, formula: Formula, live: Tensor) -> Tensor:
    assert formula.objective is not None
    parts = step.tensors["parts"]
    chosen = [parts == part for part in range(len(step.ranks))]
    plan = make_plan(formula.objective, list(map(step.part_of, chosen)), formula.state, scope=formula.scope)
    values = []
    for part, own in enumerate(chosen):
        outputs = replace(step.live(own), logprobs=live[step.mask & own[step.row]])
        with torch.set_grad_enabled(live.requires_grad):
            values.append(plan.loss(part, outputs).loss)
    return torch.stack(values).double()


def _summed(values: Tensor, index: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64).index_add(0, index, values)


def _ratio(step: Step, formula: Formula, live: Tensor) -> Tensor:
    log_ratio = live - step.tensors.get("old_logprobs", live.detach()).double()
    if formula.sequence:
        mask, rows = step.mask.double(), len(step.tensors["lengths"])
        lengths = _summed(mask, step.row, rows).clamp(min=1)
        log_ratio = (_summed(log_ratio * mask, step.row, rows) / lengths)[step.row]
    return log_ratio.exp()


def _policy_term(formula: Formula, ratio: Tensor, advantages: Tensor, live: Tensor) -> Tensor:
    low = -math.inf if formula.low is None else 1 - formula.low
    high = math.inf if formula.high is None else 1 + formula.high
    if formula.weight:
        return -ratio.clamp(max=high - 1).detach() * advantages * live
    free = ratio if formula.cap is None else ratio.clamp(max=formula.cap)
    loss = torch.maximum(-advantages * free, -advantages * ratio.clamp(low, high))
    if formula.dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * formula.dual), loss)
    return loss


def _kl(estimator: str, difference: Tensor, ratio: Tensor) -> Tensor:
    """``(N,)`` estimates from the log-prob of the reference minus that of the policy."""
    difference = -difference if "reversed" in estimator else difference
    k3 = difference.exp() - difference - 1  # hosts do not clamp it
    value = {"k1": k1(difference), "k2": k2(difference)}.get(estimator[:2], k3)
    return value * ratio if "unbiased" in estimator else value


def _mean(step: Step, formula: Formula, summed: Tensor) -> Tensor:
    """``(P,)`` from the sums over each response."""
    count, part, ranks = len(step.ranks), step.tensors["parts"], torch.tensor(step.ranks)
    lengths = _summed(step.tensors.get("counts", step.mask).double(), step.row, len(summed))
    if formula.counted == "prompts":
        lengths = lengths + step.tensors.get("prompt_lengths", torch.zeros_like(lengths))
    elif formula.counted == "padding":
        longest = torch.zeros(count).scatter_reduce(0, part, step.tensors["lengths"].float(), "amax")
        lengths = longest.double()[part]
    if formula.mean in ("step", "rank"):
        tokens = _summed(lengths, ranks[part], step.header.ranks)
        whole = float(tokens.sum()) if formula.tokens is None else formula.tokens
        divisors = torch.full_like(tokens, whole / step.header.ranks) if formula.mean == "step" else tokens
        return _summed(summed, part, count) / divisors.clamp(min=1.0)[ranks]
    responses = _summed(torch.ones_like(summed), part, count).clamp(min=1)
    micro_batches = torch.bincount(ranks, minlength=step.header.ranks)[ranks]
    if formula.mean == "part":
        return _summed(summed, part, count) / _summed(lengths, part, count).clamp(min=1) / micro_batches
    by_response = lengths.clamp(min=1) if formula.mean == "response" else torch.ones_like(lengths)
    by_response = formula.length * by_response if formula.mean == "length" else by_response
    over = (lengths > 0).sum().clamp(min=1) / step.header.ranks if formula.whole else responses * micro_batches
    return _summed(summed / by_response, part, count) / over


def coefficients_of(step: Step, formula: Formula) -> Tensor:
    """``(N,)`` float64 derivatives of what is backpropagated by the log-prob of each token."""
    live = _live(step).requires_grad_()
    (slope,) = torch.autograd.grad(values_of(step, formula, live).sum(), live, allow_unused=True)
    return torch.zeros_like(live) if slope is None else slope


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What was found of the loss.

    Attributes:
        name: of the formula that the trainer says it has, or None.
        agrees: it is that; None where nothing could be compared.
        error: largest difference, as a share of the largest coefficient or of the mass of the loss; NaN likewise.
        compared: what was compared, in words.
        findings: what is wrong, the surest first, in sentences.
    """

    name: str | None
    agrees: bool | None
    error: float
    compared: str
    findings: tuple[str, ...] = ()


def judge(steps: Sequence[Step]) -> Verdict:
    """Compare what was backpropagated with what the trainer says of its loss.

    Args:
        steps: of one dump, which has one formula.
    """
    still = (*_movement(steps), *_overflows(steps), *_advantages(steps))
    told = next((step.header.loss for step in steps if step.header.loss is not None), None)
    if told is None:
        return Verdict(None, None, math.nan, "the dump does not name its loss", still)
    pairs = [(formula, step) for step in steps if (formula := formula_of(step)) is not None]
    heard = [pair for pair in pairs if "coefficients" in pair[1].tensors or _told(pair[1]) is not None]
    heard = [pair for pair in heard if not list(_overflows(pair[1:]))]
    if not heard:
        what = "the dump holds neither losses nor coefficients" if pairs else f"'{told.name}' is not known here"
        return Verdict(told.name, None, math.nan, what, still)
    what = "coefficients of all tokens" if "coefficients" in heard[0][1].tensors else "losses of all micro-batches"
    compared = f"the {what} of {len(heard)} steps"
    try:
        error, beyond = _error(heard)
    except RlstabError as refusal:
        return Verdict(told.name, None, math.nan, f"its formula cannot be evaluated: {refusal}", still)
    if not beyond:
        return Verdict(told.name, not still, error, compared, still)
    return Verdict(told.name, False, error, compared, (*still, *_explained(heard)))


def _explained(heard: Sequence[Pair]) -> Iterator[str]:
    """What is wrong, in a sentence; in two, where gradient and reported losses are wrong in different ways."""
    wrong = [pair for pair in heard if _error([pair])[1]]
    some = f" So it is in {len(wrong)} of {len(heard)} steps." if len(wrong) < len(heard) else ""
    if named := _named(wrong):
        yield f"{named}{some}"
        return
    kinds = {what: [_recorded(pair, what) for pair in wrong] for what in ("gradient", "losses")}
    bad = {what: pairs for what, pairs in kinds.items() if _error(pairs)[1]}
    texts = {what: named for what, pairs in bad.items() if (named := _named(pairs))}
    yield from (f"{text} This is said of its {what} alone.{some}" for what, text in texts.items())
    if not texts:
        yield f"{_shape(*next(pair for pairs in bad.values() for pair in pairs if _error([pair])[1]))}{some}"


def _recorded(pair: Pair, what: str) -> Pair:
    """With the coefficients of its gradient alone, or with the values of its losses alone."""
    formula, step = pair
    if what == "losses":
        return formula, replace(step, tensors={name: step.tensors[name] for name in {*step.tensors} - {"coefficients"}})
    loss = step.header.loss
    header = step.header.model_copy(update={"loss": loss and loss.model_copy(update={"values": []})})
    return formula, replace(step, header=header)


def _told(step: Step) -> Tensor | None:
    """``(P,)`` float64: the losses that were recorded."""
    values = [] if step.header.loss is None else step.header.loss.values
    if len(values) != len(step.ranks) or not values or any(value is None for value in values):
        return None
    return torch.tensor(values, dtype=torch.float64)


Pair = tuple[Formula, Step]
Change = Callable[[Formula, Step], Pair]


def _error(pairs: Sequence[Pair], change: Change | None = None) -> tuple[float, float]:
    """Largest relative difference, and how much of what was compared differs by more than rounding."""
    worst = beyond = 0.0
    for formula, step in pairs:
        changed, seen = (formula, step) if change is None else change(formula, step)
        if "coefficients" in step.tensors:
            off, bad = _apart(step.tensors["coefficients"].double(), coefficients_of(seen, changed))
            near = _on_bound(seen, changed)
            worst, beyond = max(worst, _highest(off.masked_fill(near, 0))), beyond + int((bad & ~near).sum())
        told = _told(step)
        if told is not None:
            off = (told - values_of(seen, changed)).abs() / _mass(seen, changed).clamp(min=1e-30)
            worst, beyond = max(worst, _highest(off)), beyond + int((~(off <= OF_MASS)).sum())
    return worst, beyond


def _highest(values: Tensor) -> float:
    return float(values.nan_to_num(math.inf).max()) if values.numel() else 0.0


def _apart(recorded: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """``(N,)`` differences as a share of the largest coefficient, and bool, more than rounding."""
    larger = torch.maximum(recorded.abs(), expected.abs())
    scale = larger.max().clamp(min=1e-30) if larger.numel() else larger.sum()
    off = (recorded - expected).abs()
    return off / scale, ~(off <= RELATIVE * larger + ABSOLUTE * scale)


def _on_bound(step: Step, formula: Formula) -> Tensor:
    """``(N,)`` bool: the ratio is so near to a bound that rounding decides."""
    if formula.objective is not None:
        return torch.zeros_like(step.mask)
    ratio = _ratio(step, formula, _live(step))
    bounds = [formula.cap, formula.dual, formula.low and 1 - formula.low, formula.high and 1 + formula.high]
    near = [(ratio - bound).abs() <= ON_BOUND for bound in bounds if bound is not None]
    return torch.stack(near).any(0) if near else torch.zeros_like(step.mask)


def _mass(step: Step, formula: Formula) -> Tensor:
    """What the loss of a micro-batch would be if all advantages had one sign: near zero a loss has no digits."""
    tensors = {**step.tensors, "advantages": step.tensors["advantages"].abs()}
    return values_of(replace(step, tensors=tensors), formula).abs().max()


# -- known errors ------------------------------------------------------------------------------------------------------


def _of(step: Step, *names: str) -> dict[str, Tensor]:
    return {name: step.tensors[name] for name in names if name in step.tensors}


def _ends(step: Step) -> Tensor:
    """``(N,)`` bool, the last token of each response that has any."""
    lengths = step.tensors["lengths"]
    ends = torch.zeros_like(step.mask)
    ends[(lengths.cumsum(0) - 1)[lengths > 0]] = True
    return ends


def _shifted(step: Step, values: Tensor, by: int) -> Tensor:
    """Within each response; at its edge a value stays."""
    return torch.where(step.row.roll(by) == step.row, values.roll(by), values)


def _rounded(step: Step, kind: torch.dtype) -> dict[str, Tensor]:
    read = _of(step, "logprobs", "live_logprobs", "old_logprobs")
    return {name: values.to(kind).float() for name, values in read.items()}


def _by_response(step: Step) -> Tensor:
    """``(S,)`` float64 advantages."""
    ends, none = _ends(step), torch.zeros(len(step.tensors["lengths"]), dtype=torch.float64)
    return none.index_add(0, step.row[ends], step.tensors["advantages"][ends].double())


def _centred(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """``(S,)`` each: less the mean of its group, and the standard deviation in it."""
    count = torch.bincount(group)
    centred = values - (_summed(values, group, len(count)) / count)[group]
    return centred, (_summed(centred.square(), group, len(count)) / (count - 1).clamp(min=1)).sqrt()[group]


def _normalised(step: Step) -> dict[str, Tensor]:
    """To mean 0 and standard deviation 1 over the responses of each micro-batch."""
    centred, deviation = _centred(_by_response(step), step.tensors["parts"])
    return {"advantages": (centred / (deviation + 1e-8))[step.row]}


#: What trainers were seen to do in place of what they say: to the size of the loss, ...
_SCALES: Mapping[str, Callable[[Step], float]] = {
    "it was divided by the gradient accumulation twice": lambda step: 1 / step.accumulation,
    "it was not divided by the gradient accumulation": lambda step: step.accumulation,
    "it was divided by the number of processes once too often": lambda step: 1 / step.header.ranks,
    "it was multiplied by the number of processes": lambda step: step.header.ranks,
}
#: ... to what it reads, ...
_READ: Mapping[str, Callable[[Step], Mapping[str, Tensor]]] = {
    "the sampler's log-probs stand in the ratio in place of the trainer's": lambda step: dict(
        zip(["old_logprobs"], _of(step, "rollout_logprobs").values(), strict=False)
    ),
    "the log-probs in the denominator are shifted back by one token": lambda step: {
        name: _shifted(step, values, 1) for name, values in _of(step, "old_logprobs").items()
    },
    "the log-probs in the denominator are shifted ahead by one token": lambda step: {
        name: _shifted(step, values, -1) for name, values in _of(step, "old_logprobs").items()
    },
    "log-probs are rounded to float16 before the ratio": partial(_rounded, kind=torch.float16),
    "log-probs are rounded to bfloat16 before the ratio": partial(_rounded, kind=torch.bfloat16),
    "advantages are of the other sign": lambda step: {"advantages": -step.tensors["advantages"]},
    "advantages are normalised again in each micro-batch": _normalised,
}
#: ... to the tokens that count, ``(N,)``, ...
_MASKS: Mapping[str, Callable[[Step], Tensor]] = {
    "tokens outside the response mask count": lambda step: torch.ones_like(step.row),
    "the last token of each response, its end, does not count": lambda step: step.mask & ~_ends(step),
    "the first token of each response does not count": lambda step: step.mask & ~_ends(step).roll(1),
    "responses that were cut off do not count": lambda step: (
        step.mask & (step.tensors.get("truncated", torch.zeros(())) == 0)
    ),
    "the mask is shifted back by one token": lambda step: _shifted(step, step.mask, 1),
    "the mask is shifted ahead by one token": lambda step: _shifted(step, step.mask, -1),
}
_OVER: Mapping[str, Any] = {"tokens": None, "whole": False}
#: ... what it is divided by, ...
_MEANS = {
    "it is a mean over the tokens of each micro-batch": "part",
    "it is divided by the tokens of each rank in place of those of all": "rank",
    "it is a mean over each response, then over the responses of each micro-batch": "response",
    "it is a mean over the tokens of the optimizer step": "step",
    "it is divided by a constant length": "length",
    "it is a sum over the tokens of each response": "sum",
}


def _put(**terms: Any) -> Callable[[Formula, Step], Mapping[str, Any]]:
    return lambda formula, step: terms


#: ... and its terms; what a factor of a term explains is found by `_fitted`.
_TERMS: Mapping[str, Callable[[Formula, Step], Mapping[str, Any]]] = {
    **{text: _put(mean=mean, tokens=None, whole=False) for text, mean in _MEANS.items()},
    "prompts count in its denominator": _put(counted="prompts", tokens=None),
    "padding counts in its denominator": _put(counted="padding", tokens=None),
    "the ratio is that of the sequence": _put(sequence=True),
    "the ratio is that of the token": _put(sequence=False),
    "nothing is clipped": _put(low=None, high=None, cap=None, dual=None),
    "the clip has no lower bound": _put(low=None),
    "the clip has no upper bound": _put(high=None),
    "the upper clip range is the lower one": lambda formula, _: {"high": formula.low},
    "the clip ranges are exchanged": lambda formula, _: {"low": formula.high, "high": formula.low},
    "the ratio has no cap": _put(cap=None, dual=None),
    **{f"its KL term is {kind}": _put(estimator=kind) for kind in ("k1", "k2", "k3", "k3_unbiased")},
    "its KL term has the two policies exchanged": lambda formula, _: {"estimator": f"{formula.estimator}_reversed"},
}


def _changes(planned: bool) -> Iterator[tuple[str, Change]]:
    """What trainers were seen to do, one change each; of an objective, those that it can have."""

    def read(by: Callable[[Step], Mapping[str, Tensor]]) -> Change:
        return lambda formula, step: (formula, replace(step, tensors={**step.tensors, **by(step)}))

    def masked(by: Callable[[Step], Tensor], *counts: str) -> Change:
        return read(lambda step: {"mask": by(step), **dict.fromkeys(counts, step.tensors["mask"])})

    def moved(by: Callable[[Formula, Step], Mapping[str, Any]]) -> Change:
        return lambda formula, step: (replace(formula, **by(formula, step)), step)

    def scaled(size: Callable[[Step], float]) -> Change:
        return moved(lambda formula, step: {"scale": formula.scale * size(step)})

    yield from ((text, scaled(size)) for text, size in _SCALES.items())
    yield from ((text, read(by)) for text, by in _READ.items())
    for text, by in _MASKS.items():
        yield text, masked(by)
        yield f"{text}, and its denominator counts as if it were right", masked(by, "counts")
    if not planned:
        yield from ((text, moved(by)) for text, by in _TERMS.items())


def _named(pairs: Sequence[Pair]) -> str | None:
    """A sentence: the change, or the factors of the terms, or both, that explains the record."""
    single = dict(_changes(pairs[0][0].objective is not None))
    if known := [text for text, change in single.items() if _explains(pairs, change)]:
        return _sentence(", or what is the same here: ".join(known))
    few = sum(step.row.numel() for _, step in pairs[:2]) <= FEW
    for text, change in {"": lambda *pair: pair, **(single if few else {})}.items():
        factors, said = _fitted([change(*pair) for pair in pairs[:2]], pairs[:2])
        if _explains(pairs, _after(change, factors)):
            return _sentence(f"{text}, and {said}" if text else said)
    return None


def _fitted(pairs: Sequence[Pair], recorded: Sequence[Pair]) -> tuple[Change, str]:
    """By least squares, how often what was recorded has each term of the formula; and that in words."""
    rows, told = [], []
    for (formula, seen), (_, step) in zip(pairs, recorded, strict=True):
        kinds = [replace(formula, beta=0.0, entropy=0.0), replace(formula, entropy=0.0), formula]
        for values, again in ((step.tensors.get("coefficients"), coefficients_of), (_told(step), values_of)):
            if values is not None:
                policy, penalised, whole = (again(seen, kind) for kind in kinds)
                rows.append(torch.stack([policy, penalised - policy, whole - penalised], 1))
                told.append(values.double())
    terms = torch.cat(rows)
    policy, *others = torch.linalg.lstsq(terms, torch.cat(told)[:, None]).solution.flatten().tolist()
    # of a term that is not in the record nothing is known
    kl, bonus = (other if bool(column.any()) else policy for other, column in zip(others, terms.T[1:], strict=True))
    said = f"its policy term is {policy:.4g} times what it should be"
    for name, factor in (("KL term", kl), ("entropy bonus", bonus)):
        if not math.isclose(factor, policy, rel_tol=1e-3):
            said += f", and its {name} {round(factor, 4) + 0.0:g} times"

    def factors(formula: Formula, step: Step) -> Pair:
        beta, entropy = (value / policy if policy else 0.0 for value in (formula.beta * kl, formula.entropy * bonus))
        return replace(formula, scale=formula.scale * policy, beta=beta, entropy=entropy), step

    return factors, said


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _explains(pairs: Sequence[Pair], change: Change) -> bool:
    return all(not _error([pair], change)[1] for pair in pairs)


def _after(first: Change, second: Change) -> Change:
    return lambda formula, step: second(*first(formula, step))


# -- what nobody has a name for ----------------------------------------------------------------------------------------


def _shape(formula: Formula, step: Step) -> str:
    """Where recorded and expected differ, and what their quotient depends on."""
    parts, told = step.tensors["parts"], _told(step)
    if "coefficients" not in step.tensors:
        assert told is not None
        expected = values_of(step, formula)
        worst = int((told - expected).abs().argmax())
        return (
            f"No known error explains it. Of step {step.number} micro-batch {worst} differs most (on rank "
            f"{step.ranks[worst]}): {told[worst]:.6g} was recorded for {expected[worst]:.6g}."
        )
    recorded, expected = step.tensors["coefficients"].double(), coefficients_of(step, formula)
    off, bad = _apart(recorded, expected)
    there, some, worst = expected != 0, recorded != 0, int(off.argmax())
    row = int(step.row[worst])
    text = (
        f"No known error explains it. Of step {step.number} {int(bad.sum())} of {int(there.sum())} tokens with a "
        f"gradient differ, most token {worst - int((step.row < row).sum())} of response {row} in micro-batch "
        f"{int(parts[row])}: {recorded[worst]:.4g} was recorded for {expected[worst]:.4g}. "
        f"{int((there & ~some).sum())} have no gradient that should, {int((some & ~there).sum())} have one and "
        f"should not; the policy term of the others is"
    )
    policy = coefficients_of(step, replace(formula, beta=0.0))
    both = there & some & (policy.abs() > 1e-3 * policy.abs().max())
    quotient = ((recorded - expected + policy) / policy)[both]  # of the policy term alone
    groups = step.tensors.get("group_ids", step.tensors["sequence_ids"]).unique(return_inverse=True)[1]
    for name, group in (
        ("step", torch.zeros_like(parts)),
        ("rank", torch.tensor(step.ranks)[parts]),
        ("micro-batch", parts),
        ("group", groups),
        ("response", torch.arange(len(parts))),
    ):
        factors = _factors(quotient, group[step.row[both]])
        if factors is not None:
            shown = ", ".join(f"{factor:.4g} in {name} {place}" for place, factor in factors[:4])
            return f"{text} what it should be, times {shown or 1}."
    low, high = map(float, quotient.aminmax())
    half = ", which looks like half precision" if abs(low - 1) < HALF and abs(high - 1) < HALF else ""
    return f"{text} {low:.4g} to {high:.4g} times what it should be{half}."


def _factors(quotient: Tensor, group: Tensor) -> list[tuple[int, float]] | None:
    """The groups whose quotient is not 1, with it; None where it is not the same within a group."""
    if not quotient.numel():
        return []
    ones = torch.ones(int(group.max()) + 1, dtype=torch.float64)
    low, high = (ones.scatter_reduce(0, group, quotient, kind, include_self=False) for kind in ("amin", "amax"))
    if bool((high - low > ALIKE * high.abs().maximum(low.abs())).any()):
        return None
    return [(place, value) for place, value in enumerate(high.tolist()) if abs(value - 1) > ALIKE]


# -- what goes into it -------------------------------------------------------------------------------------------------


def _advantages(steps: Sequence[Step]) -> Iterator[str]:
    """Those of TRL, from the rewards of groups that are whole."""
    for step in steps:
        loss, rewards, groups = step.header.loss, *map(step.tensors.get, ("rewards", "group_ids"))
        if loss is None or rewards is None or groups is None:
            continue
        group = groups.unique(return_inverse=True)[1]
        centred, deviation = _centred(rewards.double(), group)
        said = loss.settings.get("scale_rewards")
        right = centred / (deviation + 1e-4) if said == "group" else centred
        size = torch.tensor(_number(loss.settings, ["num_generations"], 0))
        whole = (torch.bincount(group) == size)[group] & (step.tensors["lengths"] > 0)
        if said not in ("group", "none") or not bool(whole.any()):
            continue
        given = _by_response(step)
        off = (given - right).abs().where(whole, torch.zeros(()))
        if float(off.max()) > 1e-4 * max(float(right[whole].abs().max()), 1e-3):
            worst = int(off.argmax())
            yield (
                f"Its advantages in step {step.number} are not those of its rewards, with scale_rewards '{said}': that "
                f"of response {worst} is {given[worst]:.4g} in place of {right[worst]:.4g}."
            )
            return


def _overflows(steps: Sequence[Step]) -> Iterator[str]:
    for step in steps:
        count = int((~step.tensors.get("coefficients", torch.zeros(0)).isfinite()).sum())
        count += sum(value is None for value in step.header.loss.values) if step.header.loss else 0
        if count:
            yield f"What was backpropagated in step {step.number} has {count} values that are NaN or Inf."


def _movement(steps: Sequence[Step]) -> Iterator[str]:
    """The still test: where no weight has moved since the responses were sampled, every ratio is 1."""
    for place, step in enumerate(steps):
        old = step.tensors.get("old_logprobs")
        resting = all(before.header.learning_rate == 0 for before in steps[: place + 1])
        if old is None or not (step.header.first or resting) or not bool(step.mask.any()):
            continue
        moved = (_live(step) - old).abs()[step.mask]
        mean, clipped = float(moved.mean()), float((moved > math.log(1.2)).double().mean())
        sampled = step.tensors.get("rollout_logprobs")
        same = sampled is not None and bool((old == sampled)[step.mask].all())
        if mean > (STILL / 10 if same else STILL) or clipped > STILL:
            yield (
                f"Step {step.number} has a policy that moved before any step: the log-ratio is {mean:.3g} nats from 0 "
                f"in the mean, and {clipped:.1%} of the tokens have a ratio beyond 0.83 to 1.2."
                f"{' The log-probs in the denominator are those of the sampler, to the last bit.' if same else ''}"
            )
            return
