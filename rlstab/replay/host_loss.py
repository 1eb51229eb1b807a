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
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from rlstab.config import load_objective
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import make_plan
from rlstab.errors import RlstabError
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
#: Factors of coefficients that differ by no more are the same.
ALIKE = 3e-4
#: Tokens up to which pairs of errors are tried: there are a thousand pairs.
FEW = 50_000


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


def _number(settings: Settings, *names: str, default: Any = None) -> Any:
    """The first of some settings that is a number."""
    numbers = [float(settings[name]) for name in names if isinstance(settings.get(name), int | float)]
    return numbers[0] if numbers else default


def _trl(mean: str, **fixed: Any) -> Callable[[Settings], Formula]:
    def formula(settings: Settings) -> Formula:
        return Formula(
            mean=mean,
            low=_number(settings, "epsilon", default=0.2),
            high=_number(settings, "epsilon_high", "epsilon", default=0.2),
            cap=_number(settings, "delta"),
            beta=_number(settings, "beta", default=0.0),
            estimator="k3_unbiased" if settings.get("use_bias_correction_kl", True) else "k3",
            entropy=_number(settings, "entropy_coef", default=0.0),
            sequence=settings.get("importance_sampling_level") == "sequence",
            length=_number(settings, "max_completion_length", default=256.0),
            tokens=_number(settings, "tokens"),
            **fixed,
        )

    return formula


def _verl(settings: Settings) -> Formula:
    means = {"token-mean": "step", "seq-mean-token-mean": "response", "seq-mean-token-sum": "sum"}
    kinds = {"low_var_kl": "k3", "kl": "k1", "mse": "k2"}
    kind = str(settings.get("kl_loss_type", "k3"))
    return Formula(
        mean=means.get(str(settings.get("loss_agg_mode", "token-mean")), "length"),
        whole=True,
        low=_number(settings, "clip_ratio_low", "clip_ratio", default=0.2),
        high=_number(settings, "clip_ratio_high", "clip_ratio", default=0.2),
        dual=_number(settings, "clip_ratio_c", default=3.0),
        beta=_number(settings, "kl_loss_coef", default=0.0) if settings.get("use_kl_loss") else 0.0,
        estimator=kinds.get(kind, kind),
        entropy=_number(settings, "entropy_coeff", default=0.0),
        length=_number(settings, "loss_scale_factor", default=1.0),
        tokens=_number(settings, "tokens"),
    )


def _prime(settings: Settings) -> Formula:
    bounds = {side: _number(settings, f"dppo_mask_{side}", default=0.2) for side in ("low", "high")}
    tau = _number(settings, "kl_tau", default=1e-3)
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
    "trl/grpo": _trl("response"),
    "trl/bnpo": _trl("part"),
    "trl/dr_grpo": _trl("length"),
    "trl/dapo": _trl("step"),
    "trl/luspo": _trl("sum"),
    "trl/cispo": _trl("step", weight=True),
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
    """``(N,)`` estimates from the log-prob of the reference minus that of the policy (Schulman 2020)."""
    difference = -difference if "reversed" in estimator else difference
    if estimator.startswith("k1"):
        return -difference
    if estimator.startswith("k2"):
        return difference.square() / 2
    k3 = difference.exp() - difference - 1
    return k3 * ratio if "unbiased" in estimator else k3


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
    if not pairs:
        return Verdict(told.name, None, math.nan, f"the formula '{told.name}' is not known here", still)
    heard = [pair for pair in pairs if "coefficients" in pair[1].tensors or _told(pair[1]) is not None]
    heard = [pair for pair in heard if not list(_overflows(pair[1:]))]
    if not heard:
        return Verdict(told.name, None, math.nan, "the dump holds neither losses nor coefficients", still)
    what = (
        "the coefficients of all tokens" if "coefficients" in heard[0][1].tensors else "the losses of all micro-batches"
    )
    compared = f"{what} of {len(heard)} steps"
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
    gradient = [_recorded(pair, values=False) for pair in wrong if "coefficients" in pair[1].tensors]
    losses = [_recorded(pair, values=True) for pair in wrong if _told(pair[1]) is not None]
    bad = {"gradient": _error(gradient)[1], "losses": _error(losses)[1]}
    some = f" So it is in {len(wrong)} of {len(heard)} steps." if len(wrong) < len(heard) else ""
    if (all(bad.values()) or not gradient or not losses) and (named := _named(wrong)):
        yield f"{named}{some}"
        return
    parts = {what: pairs for what, pairs in (("gradient", gradient), ("losses", losses)) if bad[what]}
    texts = {what: named for what, pairs in parts.items() if (named := _named(pairs))}
    for what, pairs in parts.items():
        alone = "" if all(bad.values()) or not gradient or not losses else f" Of its {what} alone this is said."
        if not texts:
            yield f"{_shape(*next(pair for pair in pairs if _error([pair])[1]))}{alone}{some}"
            return
        if what in texts:
            yield f"{texts[what]}{alone or f' This is said of its {what}.'}{some}"


def _recorded(pair: Pair, *, values: bool) -> Pair:
    """With the values of the loss alone, or with the coefficients alone."""
    formula, step = pair
    tensors = {name: kept for name, kept in step.tensors.items() if name != "coefficients" or not values}
    loss = step.header.loss
    header = step.header.model_copy(update={"loss": loss and loss.model_copy(update={"values": []})})
    return formula, replace(step, tensors=tensors, header=step.header if values else header)


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


def _changes(planned: bool) -> Iterator[tuple[str, Change]]:
    """What trainers were seen to do in place of what they say, one change each; of an objective, those it can have."""

    def scaled(by: Callable[[Step], float]) -> Change:
        return lambda formula, step: (replace(formula, scale=formula.scale * by(step)), step)

    def changed(**settings: Any) -> Change:
        return lambda formula, step: (replace(formula, **settings), step)

    def moved(by: Callable[[Formula], Mapping[str, Any]]) -> Change:
        return lambda formula, step: (replace(formula, **by(formula)), step)

    def seen(by: Callable[[Step], Mapping[str, Tensor]]) -> Change:
        return lambda formula, step: (formula, replace(step, tensors={**step.tensors, **by(step)}))

    yield "it was divided by the gradient accumulation twice", scaled(lambda step: 1 / step.accumulation)
    yield "it was not divided by the gradient accumulation", scaled(lambda step: step.accumulation)
    yield "it was divided by the number of processes once too often", scaled(lambda step: 1 / step.header.ranks)
    yield "it was multiplied by the number of processes", scaled(lambda step: step.header.ranks)
    yield "its sign is turned around: it is maximised", scaled(lambda step: -1.0)
    yield "the sampler's log-probs stand in the ratio in place of the trainer's", seen(_sampled)
    for text, by in _masks():
        yield text, seen(lambda step, by=by: {"mask": by(step)})  # type: ignore[misc]  # a default is its value here
        counts = ", and its denominator counts as if it were right"
        yield f"{text}{counts}", seen(lambda step, by=by: {"mask": by(step), "counts": step.tensors["mask"]})  # type: ignore[misc]
    for text, places in (("back", 1), ("ahead", -1)):
        shifted = partial(_shifted, name="old_logprobs", by=places)
        yield f"the log-probs in the denominator are shifted {text} by one token", seen(shifted)
    for kind in (torch.float16, torch.bfloat16):
        name = str(kind).removeprefix("torch.")
        yield f"log-probs are rounded to {name} before the ratio", seen(partial(_rounded, kind=kind))
    yield "advantages are normalised again in each micro-batch", seen(_normalised)
    yield "advantages are of the other sign", seen(lambda step: {"advantages": -step.tensors["advantages"]})
    if planned:
        return
    for mean, text in (
        ("part", "it is a mean over the tokens of each micro-batch"),
        ("rank", "it is divided by the tokens of each rank in place of those of all"),
        ("response", "it is a mean over each response, then over the responses of each micro-batch"),
        ("step", "it is a mean over the tokens of the optimizer step"),
        ("length", "it is divided by a constant length"),
        ("sum", "it is a sum over the tokens of each response"),
    ):
        yield text, changed(mean=mean, tokens=None, whole=False)
    yield "tokens of the prompts count in its denominator", changed(counted="prompts", tokens=None)
    yield "padding counts in its denominator", changed(counted="padding", tokens=None)
    yield "the ratio is that of the sequence", changed(sequence=True)
    yield "the ratio is that of the token", changed(sequence=False)
    yield "nothing is clipped", changed(low=None, high=None, cap=None, dual=None)
    yield "the clip has no lower bound", changed(low=None)
    yield "the clip has no upper bound", changed(high=None)
    yield "the upper clip range is the lower one", moved(lambda formula: {"high": formula.low})
    yield "the clip ranges are exchanged", moved(lambda formula: {"low": formula.high, "high": formula.low})
    yield "the ratio has no cap", changed(cap=None, dual=None)
    yield "it has no KL term", changed(beta=0.0)
    yield "its KL coefficient counts twice", moved(lambda formula: {"beta": 2 * formula.beta})
    yield "its KL term is subtracted", moved(lambda formula: {"beta": -formula.beta})
    for estimator in ("k1", "k2", "k3", "k3_unbiased"):
        yield f"its KL term is {estimator}", changed(estimator=estimator)
    yield "its KL term has the two policies exchanged", moved(_exchanged)
    yield "its entropy bonus has the other sign", moved(lambda formula: {"entropy": -formula.entropy})
    yield "it has no entropy bonus", changed(entropy=0.0)


def _exchanged(formula: Formula) -> Mapping[str, Any]:
    return {"estimator": f"{formula.estimator}_reversed"}


def _sampled(step: Step) -> Mapping[str, Tensor]:
    sampled = step.tensors.get("rollout_logprobs")
    return {} if sampled is None else {"old_logprobs": sampled}


def _ends(step: Step) -> Tensor:
    """``(N,)`` bool, the last token of each response that has any."""
    lengths = step.tensors["lengths"]
    ends = torch.zeros_like(step.mask)
    ends[(lengths.cumsum(0) - 1)[lengths > 0]] = True
    return ends


def _truncated(step: Step) -> Tensor:
    return step.tensors.get("truncated", torch.zeros_like(step.row)) > 0


def _masks() -> Iterator[tuple[str, Callable[[Step], Tensor]]]:
    """What tokens of responses may count in place of those of the mask, ``(N,)``."""

    def without(where: Callable[[Step], Tensor]) -> Callable[[Step], Tensor]:
        return lambda step: torch.where(where(step), 0, step.tensors["mask"])

    yield "tokens outside the response mask count", lambda step: torch.ones_like(step.tensors["mask"])
    yield "the last token of each response, its end, does not count", without(_ends)
    yield "the first token of each response does not count", without(lambda step: _ends(step).roll(1))
    yield "responses that were cut off do not count", without(_truncated)
    yield "the mask is shifted back by one token", lambda step: _shifted(step, "mask", 1)["mask"]
    yield "the mask is shifted ahead by one token", lambda step: _shifted(step, "mask", -1)["mask"]


def _shifted(step: Step, name: str, by: int) -> Mapping[str, Tensor]:
    """Within each response; at its edge a value stays."""
    values = step.tensors.get(name)
    if values is None:
        return {}
    there = step.row.roll(by) == step.row
    return {name: torch.where(there, values.roll(by), values)}


def _rounded(step: Step, kind: torch.dtype) -> Mapping[str, Tensor]:
    names = step.tensors.keys() & {"logprobs", "live_logprobs", "old_logprobs"}
    return {name: step.tensors[name].to(kind).float() for name in names}


def _normalised(step: Step) -> Mapping[str, Tensor]:
    """To mean 0 and standard deviation 1 over the responses of each micro-batch."""
    part, ends = step.tensors["parts"], _ends(step)
    advantages = torch.zeros(len(part), dtype=torch.float64)
    advantages[step.row[ends]] = step.tensors["advantages"].double()[ends]
    count, parts = _summed(torch.ones_like(advantages), part, len(step.ranks)), len(step.ranks)
    centred = advantages - (_summed(advantages, part, parts) / count)[part]
    spread = (_summed(centred.square(), part, parts) / (count - 1).clamp(min=1)).sqrt()[part]
    return {"advantages": (centred / (spread + 1e-8))[step.row]}


def _named(pairs: Sequence[Pair]) -> str | None:
    """A sentence: the change, or the pair of changes, that explains all that was recorded."""
    single = list(_changes(pairs[0][0].objective is not None))
    if known := [text for text, change in single if _explains(pairs, change)]:
        return _sentence(", or what is the same here: ".join(known))
    policy, penalty = _fitted(pairs)
    if _explains(pairs, _scaled_terms(policy, penalty)):
        apart = "" if math.isclose(policy, penalty, rel_tol=1e-3) else f", and its KL term {penalty:.4g} times"
        return f"Its policy term is {policy:.4g} times what it should be{apart}."
    if sum(step.row.numel() for _, step in pairs[:2]) <= FEW:
        for (text, first), (other, second) in combinations(single, 2):
            both = _after(first, second)
            if _explains(pairs[:2], both) and _explains(pairs, both):
                return _sentence(f"{text}, and {other}")
    return None


def _fitted(pairs: Sequence[Pair]) -> tuple[float, float]:
    """By least squares, how often what was recorded has the policy term, and how often the KL term."""
    rows = []
    for formula, step in pairs:
        by_token = "coefficients" in step.tensors
        recorded = step.tensors["coefficients"].double() if by_token else _told(step)
        again = coefficients_of if by_token else values_of
        policy = again(step, replace(formula, beta=0.0))
        assert recorded is not None
        rows.append(torch.stack([policy, again(step, formula) - policy, recorded]))
    policy, penalty, recorded = torch.cat(rows, 1)
    columns = torch.stack([policy, penalty] if bool(penalty.any()) else [policy], 1)
    terms = torch.linalg.lstsq(columns, recorded[:, None]).solution.flatten().tolist()
    return terms[0], terms[-1]


def _scaled_terms(policy: float, penalty: float) -> Change:
    return lambda formula, step: (
        replace(formula, scale=formula.scale * policy, beta=formula.beta * penalty / policy if policy else 0.0),
        step,
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _explains(pairs: Sequence[Pair], change: Change) -> bool:
    return all(not _error([pair], change)[1] for pair in pairs)


def _after(first: Change, second: Change) -> Change:
    return lambda formula, step: second(*first(formula, step))


# -- what nobody has a name for ----------------------------------------------------------------------------------------


def _shape(formula: Formula, step: Step) -> str:
    """Where recorded and expected differ, and what their quotient depends on."""
    if "coefficients" not in step.tensors:
        told, expected = _told(step), values_of(step, formula)
        assert told is not None
        worst = int((told - expected).abs().argmax())
        return (
            f"No known error explains it. Of step {step.number} micro-batch {worst} differs most (on rank "
            f"{step.ranks[worst]}): {told[worst]:.6g} was recorded for {expected[worst]:.6g}."
        )
    recorded, expected = step.tensors["coefficients"].double(), coefficients_of(step, formula)
    off, bad = _apart(recorded, expected)
    there, some = expected != 0, recorded != 0
    worst = int(off.argmax())
    row = int(step.row[worst])
    parts = step.tensors["parts"]
    text = (
        f"No known error explains it. Of step {step.number} {int(bad.sum())} of {int(there.sum())} tokens with a "
        f"gradient differ, most token {worst - int((step.row < row).sum())} of response {row} in micro-batch "
        f"{int(parts[row])}: {recorded[worst]:.4g} was recorded for {expected[worst]:.4g}. "
        f"{int((there & ~some).sum())} have no gradient that should, {int((some & ~there).sum())} have one and "
        f"should not"
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
            return f"{text}; the policy term of the others is what it should be, times {shown or 1}."
    low, high = (float(value) for value in quotient.aminmax()) if quotient.numel() else (math.nan, math.nan)
    half = ", which looks like half precision" if abs(low - 1) < HALF and abs(high - 1) < HALF else ""
    return f"{text}; the policy term of the others is {low:.4g} to {high:.4g} times what it should be{half}."


def _factors(quotient: Tensor, group: Tensor) -> list[tuple[int, float]] | None:
    """The groups whose quotient is not 1, with it; None where it is not the same within a group."""
    if not quotient.numel():
        return []
    low, high = (
        torch.ones(int(group.max()) + 1, dtype=torch.float64).scatter_reduce(
            0, group, quotient, kind, include_self=False
        )
        for kind in ("amin", "amax")
    )
    if bool((high - low > ALIKE * high.abs().maximum(low.abs())).any()):
        return None
    return [(place, value) for place, value in enumerate(high.tolist()) if abs(value - 1) > ALIKE]


def _advantages(steps: Sequence[Step]) -> Iterator[str]:
    """Those of TRL, from the rewards of groups that are whole."""
    for step in steps:
        loss, rewards, ends = step.header.loss, step.tensors.get("rewards"), _ends(step)
        if loss is None or rewards is None or "group_ids" not in step.tensors:
            continue
        said, size = str(loss.settings.get("scale_rewards")), _number(loss.settings, "num_generations", default=0)
        group, count = step.tensors["group_ids"].unique(return_inverse=True, return_counts=True)[1:]
        there = torch.zeros(len(rewards), dtype=torch.bool).index_fill(0, step.row[ends], True) & (count == size)[group]
        if said not in ("group", "none") or not bool(there.any()):
            continue
        given = torch.zeros(len(rewards), dtype=torch.float64).index_add(
            0, step.row[ends], step.tensors["advantages"][ends].double()
        )
        forms = _centred(rewards.double(), group, count)
        apart = {form: float((given - values)[there].abs().max()) for form, values in forms.items()}
        right = {"group": "divided by the standard deviation of the group", "none": "not divided"}[said]
        if apart[right] > 1e-4 * max(float(forms[right][there].abs().max()), 1e-3):
            best = min(apart, key=apart.__getitem__)
            what = best if apart[best] <= 1e-4 * float(given.abs().max()) else "something that is not known here"
            yield f"Its advantages in step {step.number} are not those of its rewards, {right}. They are: {what}."
            return


def _centred(rewards: Tensor, group: Tensor, count: Tensor) -> dict[str, Tensor]:
    """Advantages that trainers make of the rewards of groups, ``(S,)`` each."""
    size, small = count[group].double(), 1e-4
    centred = rewards - (_summed(rewards, group, len(count)) / count)[group]
    squares = _summed(centred.square(), group, len(count))[group]
    deviation, everything = (squares / (size - 1)).sqrt(), rewards - rewards.mean()
    return {
        "divided by the standard deviation of the group": centred / (deviation + small),
        "not divided": centred,
        "divided by the standard deviation with N in place of N - 1": centred / ((squares / size).sqrt() + small),
        "divided by the standard deviation without 1e-4 beside it": centred / (deviation + 1e-8),
        "divided by the standard deviation, and not centred": rewards / (deviation + small),
        "less the mean of the others": centred * size / (size - 1),
        "centred and divided over all groups": everything / (rewards.std() + small),
        "the rewards": rewards,
    }


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
