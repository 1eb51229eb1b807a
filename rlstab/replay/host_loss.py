"""Was the loss what the trainer said? Its formula again, in float64, against what it backpropagated.

Where the two differ, the formula is tried with one thing changed at a time: each of the known errors of trainers is
such a change. Formulas are those of the hosts' own code at the releases that the adapters are tested with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rlstab.replay.steps import Step

#: Share of the largest coefficient, or of the mass of a loss, up to which two numbers agree: float32 on both sides.
TOLERANCE = 1e-4
#: Share of tokens that may lie beyond it: on a bound of the clip, rounding decides.
STRAY = 1e-3
#: Mean of |log-ratio|, nats, up to which a policy that has not moved may seem to: bfloat16 on other batch shapes.
STILL = 0.01


@dataclass(frozen=True)
class Formula:
    """A policy-gradient loss, in the terms in which trainers differ.

    Attributes:
        mean: what the sum of a micro-batch is divided by: tokens of the optimizer step over all ranks (``step``),
            tokens of the micro-batch (``part``), the tokens of each response and then responses (``response``),
            responses times a constant (``length``), or responses alone (``sum``). All but ``step`` are averaged over
            the micro-batches of a rank.
        low: of the clip range, to ``1 - low``; None clips nothing.
        high: of the clip range, to ``1 + high``.
        cap: the ratio is never above it, before the clip (TRL's ``delta``).
        dual: with a negative advantage the loss is at most ``-A dual``.
        weight: the clipped ratio is a constant weight of the log-prob (CISPO).
        beta: coefficient of the KL term.
        estimator: of the KL term.
        ratio: of each token, or the geometric mean over the response.
        old: log-probs in the ratio's denominator.
        counted: tokens that count, those of the mask or all of the response.
        length: the constant of ``length``.
        tokens: denominator of ``step``; None counts the tokens of the step.
        scale: multiplies the whole.
    """

    mean: Literal["step", "part", "response", "length", "sum"] = "step"
    low: float | None = 0.2
    high: float = 0.2
    cap: float | None = None
    dual: float | None = None
    weight: bool = False
    beta: float = 0.0
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = "k3"
    ratio: Literal["token", "sequence"] = "token"
    old: Literal["old", "rollout"] = "old"
    counted: Literal["mask", "all"] = "mask"
    length: float = 1.0
    tokens: float | None = None
    scale: float = 1.0


def _optional(settings: Mapping[str, Any], name: str) -> float | None:
    value = settings.get(name)
    return float(value) if isinstance(value, int | float) else None


def _number(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = _optional(settings, name)
    return default if value is None else value


def _trl(mean: str, **fixed: Any) -> Callable[[Mapping[str, Any]], Formula]:
    def formula(settings: Mapping[str, Any]) -> Formula:
        low = _number(settings, "epsilon", 0.2)
        return Formula(
            mean=mean,  # type: ignore[arg-type]  # one of the literals
            low=low,
            high=_number(settings, "epsilon_high", low),
            cap=_optional(settings, "delta"),
            beta=_number(settings, "beta", 0.0),
            estimator="k3_unbiased" if settings.get("use_bias_correction_kl", True) else "k3",
            ratio="sequence" if settings.get("importance_sampling_level") == "sequence" else "token",
            length=_number(settings, "max_completion_length", 256.0),
            tokens=_optional(settings, "tokens"),
            **fixed,
        )

    return formula


def _verl(settings: Mapping[str, Any]) -> Formula:
    clip = _number(settings, "clip_ratio", 0.2)
    means: Mapping[object, Literal["step", "response"]] = {"token-mean": "step", "seq-mean-token-mean": "response"}
    return Formula(
        mean=means.get(settings.get("loss_agg_mode", "token-mean"), "step"),
        low=_number(settings, "clip_ratio_low", clip),
        high=_number(settings, "clip_ratio_high", clip),
        dual=_number(settings, "clip_ratio_c", 3.0),
        tokens=_optional(settings, "tokens"),
    )


#: The formulas that are known, by name.
FORMULAS: Mapping[str, Callable[[Mapping[str, Any]], Formula]] = {
    "trl/grpo": _trl("response"),
    "trl/bnpo": _trl("part"),
    "trl/dr_grpo": _trl("length"),
    "trl/dapo": _trl("step"),
    "trl/luspo": _trl("sum"),
    "trl/cispo": _trl("step", weight=True),
    "verl/vanilla": _verl,
}


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


def values_of(step: Step, formula: Formula, live: Tensor | None = None) -> Tensor:
    """``(P,)`` float64: what each micro-batch of a step backpropagates, over all ranks.

    The gradient of the step is that of their sum over the micro-batches of a rank, averaged over ranks.

    Args:
        step: of a dump.
        formula: of the loss.
        live: ``(N,)`` float64 log-probs of the live policy, to differentiate; None takes those of the dump.
    """
    tokens, row, count = step.tokens, step.row, step.lengths.numel()
    live = tokens["logprobs"].double() if live is None else live
    mask = (torch.ones_like(step.mask) if formula.counted == "all" else step.mask).double()
    old = tokens.get("rollout_logprobs" if formula.old == "rollout" else "old_logprobs")
    log_ratio = live - (live.detach() if old is None else old.double())
    per_response = torch.zeros(count, dtype=torch.float64).index_add(0, row, mask)
    if formula.ratio == "sequence":
        total = torch.zeros(count, dtype=torch.float64).index_add(0, row, log_ratio * mask)
        log_ratio = (total / per_response.clamp(min=1))[row]
    ratio = log_ratio.exp()
    loss = _policy_term(formula, ratio, tokens["advantages"].double(), live)
    if formula.beta and "ref_logprobs" in tokens:
        loss = loss + formula.beta * _kl(formula.estimator, tokens["ref_logprobs"].double() - live, ratio)
    summed = torch.zeros(count, dtype=torch.float64).index_add(0, row, loss * mask)
    return formula.scale * _mean(step, formula, summed, per_response)


def _policy_term(formula: Formula, ratio: Tensor, advantages: Tensor, live: Tensor) -> Tensor:
    low = None if formula.low is None else 1 - formula.low
    clipped = ratio if low is None else ratio.clamp(low, 1 + formula.high)
    if formula.weight:
        return -ratio.clamp(max=formula.high).detach() * advantages * live
    free = ratio if formula.cap is None else ratio.clamp(max=formula.cap)
    loss = torch.maximum(-advantages * free, -advantages * clipped)
    if formula.dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * formula.dual), loss)
    return loss


def _kl(estimator: str, difference: Tensor, ratio: Tensor) -> Tensor:
    """``(N,)`` estimates from the log-prob of the reference minus that of the policy (Schulman 2020)."""
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    k3 = difference.exp() - difference - 1
    return k3 * ratio if estimator == "k3_unbiased" else k3


def _mean(step: Step, formula: Formula, summed: Tensor, per_response: Tensor) -> Tensor:
    parts = len(step.ranks)

    def over_parts(values: Tensor) -> Tensor:
        return torch.zeros(parts, dtype=torch.float64).index_add(0, step.part, values)

    if formula.mean == "step":
        tokens = float(per_response.sum()) if formula.tokens is None else formula.tokens
        return over_parts(summed) * step.processes / max(tokens, 1.0)
    responses = over_parts(torch.ones_like(summed)).clamp(min=1)
    if formula.mean == "part":
        mean = over_parts(summed) / over_parts(per_response).clamp(min=1)
    elif formula.mean == "response":
        mean = over_parts(summed / per_response.clamp(min=1)) / responses
    else:
        mean = over_parts(summed) / (responses * (formula.length if formula.mean == "length" else 1.0))
    return mean / torch.tensor([step.ranks.count(rank) for rank in step.ranks], dtype=torch.float64)


def coefficients_of(step: Step, formula: Formula) -> Tensor:
    """``(N,)`` float64 derivatives of what is backpropagated by the log-prob of each token."""
    live = step.tokens["logprobs"].double().requires_grad_()
    (slope,) = torch.autograd.grad(values_of(step, formula, live).sum(), live)
    return slope


# -- the comparison ----------------------------------------------------------------------------------------------------


def judge(steps: Sequence[Step]) -> Verdict:
    """Compare what was backpropagated with what the trainer says of its loss.

    Args:
        steps: of one dump, which has one formula.
    """
    still = tuple(_movement(steps))
    told = next((step.loss for step in steps if step.loss is not None), None)
    if told is None:
        return Verdict(None, None, math.nan, "the dump does not name its loss", still)
    if told.name not in FORMULAS:
        return Verdict(told.name, None, math.nan, f"the formula '{told.name}' is not known here", still)
    heard = [step for step in steps if step.loss is not None and _recorded(step) is not None]
    if not heard:
        return Verdict(told.name, None, math.nan, "the dump holds neither losses nor coefficients", still)
    by_token = all("coefficients" in step.tokens for step in heard)
    formula = {step.number: FORMULAS[told.name](step.loss.settings) for step in heard if step.loss}
    compared = (
        f"{'the coefficient of every token' if by_token else 'the loss of every micro-batch'} of {len(heard)} steps"
    )
    error, stray = _error(heard, formula, lambda given, step: given)
    if stray <= STRAY:
        return Verdict(told.name, not still, error, compared, still)
    return Verdict(told.name, False, error, compared, (*still, *_explained(heard, formula)))


def _recorded(step: Step) -> Tensor | None:
    """What was recorded of a step: by token where it is there, else by micro-batch."""
    if "coefficients" in step.tokens:
        return step.tokens["coefficients"].double()
    values = [] if step.loss is None else step.loss.values
    if len(values) != len(step.ranks) or any(value is None for value in values):
        return None
    return torch.tensor(values, dtype=torch.float64)


Change = Callable[[Formula, Step], Formula]


def _error(steps: Sequence[Step], formulas: Mapping[int, Formula], change: Change) -> tuple[float, float]:
    """Largest relative difference but for strays, and the share of what differs by more than the tolerance."""
    worst, beyond, count = 0.0, 0, 0
    for step in steps:
        recorded, formula = _recorded(step), change(formulas[step.number], step)
        assert recorded is not None
        if "coefficients" in step.tokens:
            expected = coefficients_of(step, formula)
            scale = torch.maximum(expected.abs().max(), recorded.abs().max())
        else:
            expected = values_of(step, formula)
            scale = _mass(step, formula)
        off = (recorded - expected).abs() / scale.clamp(min=1e-30)
        bad = ~(off <= TOLERANCE)
        beyond, count = beyond + int(bad.sum()), count + bad.numel()
        worst = max(worst, float(off.nan_to_num(math.inf).max()) if bad.numel() else 0.0)
    return worst, beyond / max(count, 1)


def _mass(step: Step, formula: Formula) -> Tensor:
    """What the loss of a micro-batch would be if all advantages had one sign: near zero a loss has no digits."""
    tokens = {**step.tokens, "advantages": step.tokens["advantages"].abs()}
    return values_of(replace(step, tokens=tokens), formula).abs().max()


def _changes() -> Iterator[tuple[str, Change]]:
    """What trainers were seen to do in place of what they say, each as one change of a formula."""

    def scaled(by: Callable[[Step], float]) -> Change:
        return lambda formula, step: replace(formula, scale=formula.scale * by(step))

    def changed(**settings: Any) -> Change:
        return lambda formula, step: replace(formula, **settings)

    yield "it was divided by the gradient accumulation twice", scaled(lambda step: 1 / step.accumulation)
    yield "it was not divided by the gradient accumulation", scaled(lambda step: step.accumulation)
    yield "it was divided by the number of processes once too often", scaled(lambda step: 1 / step.processes)
    yield "it was multiplied by the number of processes", scaled(lambda step: step.processes)
    yield "its sign is turned around: it is maximised", scaled(lambda step: -1.0)
    yield "it is a mean over the tokens of each micro-batch", changed(mean="part")
    yield "it is a mean over each response, then over the responses of each micro-batch", changed(mean="response")
    yield "it is a mean over the tokens of the optimizer step", changed(mean="step", tokens=None)
    yield "it is divided by a constant length", changed(mean="length")
    yield "the sampler's log-probs stand in the ratio in place of the trainer's", changed(old="rollout")
    yield "tokens outside the response mask count", changed(counted="all")
    yield "the ratio is that of the sequence", changed(ratio="sequence")
    yield "the ratio is that of the token", changed(ratio="token")
    yield "nothing is clipped", changed(low=None, cap=None, dual=None)
    yield (
        "the upper clip range is the lower one",
        lambda formula, step: replace(formula, high=formula.low or formula.high),
    )
    yield "the ratio has no cap", changed(cap=None, dual=None)
    yield "it has no KL term", changed(beta=0.0)
    for estimator in ("k1", "k2", "k3", "k3_unbiased"):
        yield f"its KL term is {estimator}", changed(estimator=estimator)


def _explained(steps: Sequence[Step], formulas: Mapping[int, Formula]) -> Iterator[str]:
    """A sentence: the change, or the pair of changes, that explains all that was recorded; else what it looks like."""
    single = list(_changes())
    known = [text for text, change in single if _error(steps, formulas, change)[1] <= STRAY]
    if known:
        text = ", or what is the same here: ".join(known)
        yield f"{text[0].upper()}{text[1:]}."
        return
    few = steps[:2]  # pairs are many
    for place, (text, change) in enumerate(single):
        for other, also in single[place + 1 :]:
            both = _after(change, also)
            if _error(few, formulas, both)[1] <= STRAY and _error(steps, formulas, both)[1] <= STRAY:
                yield f"{text[0].upper()}{text[1:]}, and {other}."
                return
    yield _shape(steps, formulas)


def _after(first: Change, second: Change) -> Change:
    return lambda formula, step: second(first(formula, step), step)


def _shape(steps: Sequence[Step], formulas: Mapping[int, Formula]) -> str:
    """What the quotient of recorded and expected depends on, where coefficients are there."""
    step = steps[0]
    recorded = _recorded(step)
    assert recorded is not None
    if "coefficients" not in step.tokens:
        expected = values_of(step, formulas[step.number])
        pairs = ", ".join(f"{a:.4g} for {b:.4g}" for a, b in zip(recorded[:4], expected[:4], strict=True))
        return f"No known error explains it. Losses of step {step.number}, recorded for expected: {pairs}."
    expected = coefficients_of(step, formulas[step.number])
    there = expected != 0
    lost, extra = int((there & (recorded == 0)).sum()), int((~there & (recorded != 0)).sum())
    both = there & (recorded != 0)
    quotient = recorded[both] / expected[both]
    text = (
        f"No known error explains it. Of {int(there.sum())} tokens with a gradient {lost} have none, and {extra} "
        f"beyond them have one"
    )
    for name, group in (
        ("the same for all tokens", torch.zeros_like(step.row)),
        ("the same within a rank", torch.tensor(step.ranks)[step.part[step.row]]),
        ("the same within a micro-batch", step.part[step.row]),
        ("the same within a response", step.row),
    ):
        if both.any() and _constant(quotient, group[both]):
            return f"{text}; the others are {float(quotient.median()):.4g} times what they should be, {name}."
    return f"{text}; the quotient of recorded and expected goes from {_range(quotient)}."


def _range(values: Tensor) -> str:
    return f"{float(values.min()):.4g} to {float(values.max()):.4g}" if values.numel() else "nothing to nothing"


def _constant(values: Tensor, group: Tensor) -> bool:
    count = int(group.max()) + 1
    low = torch.full((count,), math.inf, dtype=values.dtype).scatter_reduce(0, group, values, "amin")
    high = torch.full((count,), -math.inf, dtype=values.dtype).scatter_reduce(0, group, values, "amax")
    seen = high >= low
    return bool(((high - low)[seen] <= TOLERANCE * high[seen].abs().maximum(low[seen].abs())).all())


def _movement(steps: Sequence[Step]) -> Iterator[str]:
    """The still test: where no weight has moved since the responses were sampled, every ratio is 1."""
    for step in steps:
        old = step.tokens.get("old_logprobs")
        if old is None or not (step.first or step.learning_rate == 0) or not bool(step.mask.any()):
            continue
        moved = (step.tokens["logprobs"] - old).double().abs()[step.mask]
        mean = float(moved.mean())
        if mean <= STILL:
            continue
        clipped = float((moved > math.log(1.2)).double().mean())
        sampled = step.tokens.get("rollout_logprobs")
        why = ""
        if sampled is not None and bool((old == sampled)[step.mask].all()):
            why = " The log-probs in the denominator are those of the sampler, to the last bit."
        yield (
            f"Step {step.number} has a policy that moved before any step: the log-ratio is {mean:.3g} nats from 0 in "
            f"the mean, and {clipped:.1%} of the tokens have a ratio beyond 0.83 to 1.2.{why}"
        )
        return
