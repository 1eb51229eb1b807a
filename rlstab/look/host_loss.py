"""Whether the loss was what the trainer said: its formula, evaluated again in float64, against what was backpropagated.

If the two differ, they are compared again with one thing changed at a time, in the formula or in the tokens: each error
in :mod:`rlstab.look.known_errors` is such a change. Formulas are those of the hosts' code at the releases that the
adapters are tested with.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlstab.console import capital, counted
from rlstab.errors import ReportError, RlstabError
from rlstab.kl_estimators import k1, k2
from rlstab.look.known_errors import CHANGES, Edit, advantage_of, counts_of
from rlstab.look.recorded_loss import Formula, Loss, loss_of
from rlstab.record import Step
from rlstab.record.effects import RECORDED
from rlstab.report.formatting import listed

#: Two coefficients agree up to this share of the larger one.
RELATIVE = 1e-4
#: In float32, two values agree up to this share of the largest coefficient of the step, or of what the loss of a
#: micro-batch would be if all advantages had one sign.
ABSOLUTE = 1e-5
#: This close to a bound of the clip, rounding decides, so the token is not compared.
ON_BOUND = 1e-5
#: Mean of |log-ratio|, nats, that a policy which has not moved may show: bfloat16 on other batch shapes.
STILL = 0.01
#: Relative errors of coefficients up to this may come from half precision: a log-prob of 8 nats in bfloat16.
HALF = 0.035
#: Factors of coefficients count as equal up to this relative difference.
ALIKE = 3e-4
#: Changes and factors are tried together for at most this many tokens; more would take a minute.
FEW = 200_000
#: Relative rounding error of a mean of rewards in float32: its last digits.
ROUNDING = 2.0**-21
#: An objective is planned again for at most this many micro-batches of a step, about a millisecond each.
MOST_PLANNED = 10_000
#: Factors of the three terms of a loss that is what it should be.
PLAIN = (1.0, 1.0, 1.0)


# -- the loss again ----------------------------------------------------------------------------------------------------


def terms_of(loss: Loss, step: Step, kind: str) -> Tensor:
    """The policy term, the KL term and the entropy bonus, in float64; those of an objective count as the first.

    Args:
        loss: the one that the trainer says it minimises.
        step: a step of a dump.
        kind: ``losses``, ``(P, 3)``, is what each micro-batch backpropagates, over all ranks; the gradient of the step
            is that of their sum over the micro-batches of a rank, averaged over ranks. ``gradient``, ``(N, 3)``, are
            its derivatives by the log-prob of each token.
    """
    live = step.live_logprobs.requires_grad_(kind == "gradient")
    with torch.set_grad_enabled(kind == "gradient"):
        terms = _planned(step, loss, live) if loss.formula is None else _losses(step, loss.formula, live)
    if kind == "gradient":
        grad = partial(torch.autograd.grad, inputs=live, retain_graph=True, allow_unused=True, materialize_grads=True)
        terms = [grad(term.sum())[0] if term.requires_grad else torch.zeros_like(live) for term in terms]
    return loss.scale * torch.stack(terms, 1)


def _planned(step: Step, loss: Loss, live: Tensor) -> list[Tensor]:
    """Terms of an objective."""
    rows = list(step.micro_batches())
    if len(rows) > MOST_PLANNED:
        raise ReportError(f"step {step.number} has {len(rows):,} micro-batches, more than {MOST_PLANNED:,}")
    step = step.having({"live_now": live})
    parts = [step.only(responses) for _, responses in rows]
    plan = loss.plan([part.batch for part in parts])
    values = torch.zeros(len(step.ranks), dtype=torch.float64)
    for index, ((number, _), part) in enumerate(zip(rows, parts, strict=True)):
        value = plan.loss(index, replace(part.live, logprobs=part.tensors["live_now"][part.mask])).loss
        values = values.index_add(0, torch.tensor([number]), value.double()[None])
    return [step.header.ranks * values, torch.zeros_like(values), torch.zeros_like(values)]


def _losses(step: Step, formula: Formula, live: Tensor) -> list[Tensor]:
    """Terms of a host's formula: each a sum over tokens, times a weight of the response."""
    tensors, ratio = step.tensors, _ratio(step, formula, live)
    advantages = tensors["advantages"].double()
    if formula.weight:
        weight = ratio.clamp(max=formula.high)
        policy = -(weight.detach() if formula.is_held else weight) * advantages * live
    else:
        clipped = -advantages * ratio.clamp(1 - formula.low, 1 + formula.high)
        free = -advantages * ratio.clamp(max=formula.cap)
        bounds = {"larger": torch.maximum(clipped, free), "smaller": torch.minimum(clipped, free), "clipped": clipped}
        policy = bounds[formula.bound]
    kl = bonus = torch.zeros_like(live)
    if formula.beta and "ref_logprobs" in tensors:
        difference = tensors["ref_logprobs"].double() - live
        difference = -difference if formula.is_exchanged else difference
        k3 = difference.exp() - difference - 1  # hosts do not clamp it
        kl = formula.beta * {"k1": k1(difference), "k2": k2(difference), "k3": k3}[formula.estimator[:2]]
        kl = kl * ratio if "unbiased" in formula.estimator else kl
    if formula.entropy and "entropies" in tensors:
        bonus = -formula.entropy * tensors["entropies"].double()
    weights = _weights(step, formula, formula.mean)
    of_tokens = (policy * tensors.get("weights", 1.0), weights), (kl, weights), (bonus, _weights(step, formula, "part"))
    part, count = tensors["parts"][step.row], len(step.ranks)
    return [summed(term * weight[step.row] * step.mask, part, count) for term, weight in of_tokens]


def summed(values: Tensor, index: Tensor, count: int) -> Tensor:
    """``(count,)`` float64 sums of the values with the same index."""
    return torch.zeros(count, dtype=torch.float64).index_add(0, index, values.double())


def _ratio(step: Step, formula: Formula, live: Tensor) -> Tensor:
    log_ratio = live - step.tensors.get("old_logprobs", live.detach()).double()
    if formula.sequence == "unmasked":
        log_ratio = (summed(log_ratio, step.row, len(step.tensors["lengths"])) / step.tensors["lengths"])[step.row]
    elif formula.sequence:
        count = 1 if formula.sequence == "product" else counts_of(step).clamp(min=1)
        log_ratio = (step.by_response(log_ratio) / count)[step.row]
    return log_ratio.exp()


def _weights(step: Step, formula: Formula, mean: str) -> Tensor:
    """``(S,)`` float64: the factor of the sum over the tokens of each response."""
    part, ranks = step.tensors["parts"], torch.tensor(step.ranks)
    counts = step.tensors.get("counts", counts_of(step))
    micro_batches = torch.bincount(ranks)[ranks][part]
    responses = torch.bincount(part, minlength=len(ranks))[part] * micro_batches
    divisors = {
        "step": (formula.tokens or counts.sum()) / step.header.ranks,
        "rank": summed(counts, ranks[part], len(ranks))[ranks[part]],
        "part": summed(counts, part, len(ranks))[part] * micro_batches,
        "response": counts * responses,
        "constant": formula.length * responses,
    }
    divisor = torch.as_tensor(divisors[mean], dtype=torch.float64).clamp(min=1e-9)  # without tokens any will do
    return 1 / divisor.expand(len(part))


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossVerdict:
    """The finding about the loss.

    Attributes:
        name: what the trainer calls its formula, or None.
        agrees: whether the loss is that formula; None if nothing could be compared.
        error: largest difference, as a share of the largest coefficient or of the mass of the loss; NaN if nothing
            could be compared.
        compared: what was compared, in words.
        findings: what is wrong, as sentences, the most certain first.
        errors: the largest difference of each step, by its number.
        rounding: a difference below is rounding.
        unloaded: methods whose code is not loaded, for which what the dump says of them stood in.
    """

    name: str | None
    agrees: bool | None
    error: float
    compared: str
    findings: tuple[str, ...] = ()
    errors: Mapping[int, float] = field(default_factory=dict)
    rounding: float = ABSOLUTE
    unloaded: Sequence[str] = ()

    @property
    def sentence(self) -> str:
        """The verdict on the loss in one sentence."""
        if self.agrees is None:
            return f"It cannot be decided whether the loss was what it said: {self.compared}."
        digits = math.floor(-math.log10(min(max(1e-12, self.error), 1e12)))
        if self.agrees:
            condition = f", given what {listed(self.unloaded)} did" if self.unloaded else ""
            return f"The loss is {self.name}: {self.compared} agree to {counted(digits, 'digit')}{condition}."
        if self.findings and digits >= 4:
            return f"The loss is {self.name}, to {counted(digits, 'digit')}, but its inputs are wrong."
        return f"The loss is not {self.name}: {self.compared} differ by up to {self.error:.2g} of the largest."


def judge(steps: Sequence[Step]) -> LossVerdict:
    """Compare what was backpropagated with what the trainer says of its loss.

    Args:
        steps: the steps of one dump, all with the same formula.
    """
    findings = (*_movement(steps), *_overflows(steps), *_advantages(steps))
    name = next((step.header.loss.name for step in steps if step.header.loss is not None), None)
    losses = [(loss, step) for step in steps if (loss := loss_of(step)) is not None]
    records = [
        (loss, step, kind)
        for loss, step in losses
        if not list(_overflows([step]))
        for kind in recorded_of(step)
        if kind == "gradient" or not loss.by_gradient
    ]
    if not records:
        unknown = f"'{name}' as it is set is not known here" if name else "the dump does not name its loss"
        reason = "the dump holds neither losses nor coefficients" if losses else unknown
        return LossVerdict(name, None, math.nan, reason, findings)
    try:
        differences = [_difference(_compared(record)) for record in records]
    except RlstabError as refusal:
        return LossVerdict(name, None, math.nan, f"its formula cannot be evaluated: {refusal}", findings)
    subject = "coefficients of all tokens" if records[0][2] == "gradient" else "losses of all micro-batches"
    unloaded, tokens = list(dict.fromkeys(name for loss, _ in losses for name in loss.unloaded)), 0
    if unloaded:
        total = sum(int(step.mask.sum()) for _, step, _ in records)
        tokens = sum(int((step.mask & ~_unsure(loss, step)).sum()) for loss, step, _ in records)
        subject = subject if tokens == total else f"coefficients of {tokens:,} of {total:,} tokens"
    errors: dict[int, float] = {}
    for (_, step, _), (error, _) in zip(records, differences, strict=True):
        errors[step.number] = max(error, errors.get(step.number, 0.0))
    error, compared = max(errors.values()), f"the {subject} of {counted(len(errors), 'step')}"
    wrong = [record for record, (_, is_beyond) in zip(records, differences, strict=True) if is_beyond]
    reason = ""
    if unloaded and (wrong or not tokens):  # they may do what no tensor says
        reason = f"the code of {listed(unloaded)} is not loaded, and the dump does not say all that it did"
        reason += "; --code FILE.py runs it"
    elif wrong and wrong[0][0].formula is None and wrong[0][0].nearly:
        reason = f"it is only nearly an objective. {' '.join(wrong[0][0].nearly).rstrip('.')}"
    if reason:
        return LossVerdict(name, None, error, reason, findings, errors)
    if not wrong:
        return LossVerdict(name, not findings, error, compared, findings, errors, unloaded=unloaded)
    numbers = {step.number for _, step, _ in wrong}
    share = f" This is the case in {len(numbers)} of {len(errors)} steps." if len(numbers) < len(errors) else ""
    explained = _explained([record for record in records if record[1].number in numbers], wrong)
    return LossVerdict(name, False, error, compared, (*findings, *(f"{text}{share}" for text in explained)), errors)


#: The loss that a step claims, the step, and which of its recorded numbers are compared: ``gradient`` or ``losses``.
Claim = tuple[Loss, Step, str]
#: The recorded numbers ``(n,)``, the terms of the expected ones ``(n, 3)``, and the share up to which the two agree;
#: coefficients in units of the largest, losses in units of their mass.
Compared = tuple[Tensor, Tensor, float]


def recorded_of(step: Step) -> dict[str, Tensor]:
    """In float64, the coefficients ``(N,)`` and the losses ``(P,)``, if the dump has them."""
    recorded = {"gradient": step.tensors["coefficients"].double()} if "coefficients" in step.tensors else {}
    values = [] if step.header.loss is None else step.header.loss.values
    if values and len(values) == len(step.ranks) and None not in values:
        recorded["losses"] = torch.tensor(values, dtype=torch.float64)
    return recorded


def _changed(record: Claim, edit: Edit) -> Claim:
    """The same, with a change to the formula or to the tensors."""
    loss, step, kind = record
    fields = vars(loss.formula or Formula())
    before, values = {**step.tensors, **fields}, dict[str, Any]()
    for name, value in edit.items():
        values[name] = value(step, name) if callable(value) else before.get(value, value)
    tensors = {name: value for name, value in values.items() if name not in fields and isinstance(value, Tensor)}
    formula = loss.formula and replace(loss.formula, **{name: values[name] for name in values.keys() & fields.keys()})
    loss = replace(loss, formula=formula, scale=loss.scale * float(values.get("scale", 1.0)))
    return loss, step.having(tensors), kind


def _compared(record: Claim) -> Compared:
    loss, step, kind = record
    recorded, terms = recorded_of(step)[kind], terms_of(loss, step, kind)
    if kind == "losses":  # near zero a loss has no digits
        sized = step.having({"advantages": step.tensors["advantages"].abs()})
        size = terms_of(loss, sized, kind).sum(1).abs().max().clamp(min=1e-30)
        return recorded / size, terms / size, 0.0
    sure = ~_unsure(loss, step)
    recorded, terms = recorded * sure, terms * sure[:, None]
    size = torch.cat([recorded, terms.sum(1), torch.full((1,), 1e-30)]).abs().max()
    return recorded / size, terms / size, RELATIVE


def _unsure(loss: Loss, step: Step) -> Tensor:
    """``(N,)`` bool: rounding decides, so close is the ratio to a bound, or a penalty is not known."""
    formula = loss.formula
    if formula is None:
        assert loss.objective is not None
        columns = [name for member in loss.objective.members if member.name == RECORDED for name in member.needs]
        regularised = [step.tensors[name] > 0 for name in columns if name.endswith("/regularised")]
        return sum(regularised, torch.zeros_like(step.mask))
    ratio = _ratio(step, formula, step.live_logprobs)
    bounds = (formula.cap, 1 - formula.low, 1 + formula.high)
    return sum(((ratio - bound).abs() <= ON_BOUND for bound in bounds), torch.zeros_like(step.mask))


def _difference(rows: Compared, factors: Sequence[float] = PLAIN) -> tuple[float, bool]:
    """The largest difference, and whether any exceeds rounding, for the terms times some factors."""
    recorded, terms, share = rows
    expected = terms @ torch.tensor(factors, dtype=torch.float64)
    difference = (recorded - expected).abs().nan_to_num(math.inf)
    absolute = ABSOLUTE * min(1.0, max(1e-6, *map(abs, factors)))
    is_beyond = ~(difference <= share * torch.maximum(recorded.abs(), expected.abs()) + absolute)
    return float(difference.max()) if difference.numel() else 0.0, bool(is_beyond.any())


def _explained(records: Sequence[Claim], wrong: Sequence[Claim]) -> Sequence[str]:
    """What is wrong, in one sentence; in two if gradient and reported losses are wrong in different ways."""
    if named := _named(records):
        return [named]
    kinds = {kind: [record for record in wrong if record[2] == kind] for _, _, kind in wrong}
    texts = [f"{named} This holds only for its {kind}." for kind, claims in kinds.items() if (named := _named(claims))]
    return texts or [_located(*wrong[0])]


# -- errors with a name ------------------------------------------------------------------------------------------------


def _named(records: Sequence[Claim]) -> str | None:
    """A sentence with the change, the factors of the terms, or both, that explain every difference; None if none do."""
    planned: Set[str] = {"counts", *vars(Formula())} if records[0][0].formula is None else set()
    is_small = sum(step.row.numel() for _, step, _ in records[:4]) <= FEW
    exact, fitted = list[str](), ""
    for text, edit in {"": {}, **CHANGES}.items():
        if edit.keys() & planned:  # the objective has no such field, and its plan counts for itself
            continue
        first = _compared(_changed(records[0], edit))
        if not _difference(first)[1] and _explains(records[1:], edit):
            exact.append(text)
        elif not fitted and (is_small or not text) and not _difference(first, _fitted([first])[0])[1]:
            factors, words = _fitted([_compared(_changed(record, edit)) for record in records[:4]])
            if _explains(records, edit, factors):
                fitted = f"{text}, and {words}" if text else words
    text = ", or, equivalently here, ".join(exact) or fitted
    return f"{capital(text)}." if text else None


def _explains(records: Sequence[Claim], edit: Edit, factors: Sequence[float] = PLAIN) -> bool:
    return not any(_difference(_compared(_changed(record, edit)), factors)[1] for record in records)


def _fitted(rows: Sequence[Compared]) -> tuple[list[float], str]:
    """The factor of each term of the formula in the recorded numbers, by least squares, and the factors in words."""
    recorded, terms = torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
    finite = terms.isfinite().all(1) & recorded.isfinite()
    if not bool(finite.any()):
        return list(PLAIN), ""
    recorded, terms = recorded[finite], terms[finite]
    # the default driver reads uninitialised memory, and with a column of zeros it may answer 0
    policy, *rest = torch.linalg.lstsq(terms, recorded[:, None], driver="gelsd").solution.flatten().tolist()
    text = f"its policy term is {policy:.4g} times what it should be"
    factors = [policy]
    for name, factor, column in zip(("KL term", "entropy bonus"), rest, terms.T[1:], strict=True):
        size = float(column.abs().max())  # the record may lack the term, and rounding is not a term
        factors.append(policy if not size else factor if abs(factor) * size > ABSOLUTE else 0.0)
        if not math.isclose(factors[-1], policy, rel_tol=1e-3):
            text += f", and its {name} {round(factors[-1], 4) + 0.0:g} times"
    return factors, text


# -- errors without a name ---------------------------------------------------------------------------------------------


def _located(loss: Loss, step: Step, kind: str) -> str:
    """Where recorded and expected values differ, and what their quotient depends on."""
    parts, recorded, terms = step.tensors["parts"], recorded_of(step)[kind], terms_of(loss, step, kind)
    expected = terms.sum(1)
    difference = (recorded - expected).abs()
    worst = int(difference.argmax())
    values = f"{recorded[worst]:.6g} was recorded for {expected[worst]:.6g}"
    lead = f"No known error explains it. Of step {step.number}"
    if kind == "losses":
        return f"{lead} micro-batch {worst} differs most (on rank {step.ranks[worst]}): {values}."
    is_expected, is_recorded, row = expected != 0, recorded != 0, int(step.row[worst])
    is_wrong = difference > RELATIVE * torch.maximum(recorded.abs(), expected.abs()) + ABSOLUTE * expected.abs().max()
    text = (
        f"{lead} {int(is_wrong.sum())} of {int((is_expected | is_recorded).sum())} tokens with a gradient differ, most "
        f"token {worst - int((step.row < row).sum())} of response {row} in micro-batch {int(parts[row])}: {values}. "
        f"{int((is_expected & ~is_recorded).sum())} have no gradient that should, "
        f"{int((is_recorded & ~is_expected).sum())} have one and should not; the policy term of the others is"
    )
    policy = terms[:, 0]
    compared = is_expected & is_recorded & (policy.abs() > 1e-3 * policy.abs().max())
    quotient = ((recorded - expected + policy) / policy)[compared]
    if not quotient.numel():
        return f"{text} what it should be."
    units = {"rank": torch.tensor(step.ranks)[parts], "micro-batch": parts, "group": step.groups}
    for name, of_response in {**units, "response": torch.arange(len(parts))}.items():
        group = of_response[step.row[compared]]
        centred, _ = _centred(quotient, group)
        if bool((centred.abs() <= ALIKE * quotient.abs()).all()):
            factors = dict(sorted(zip(group.tolist(), (quotient - centred).tolist(), strict=True)))
            scaled = [f"{factor:.4g} in {name} {index}" for index, factor in factors.items() if abs(factor - 1) > ALIKE]
            return f"{text} what it should be, times {', '.join(scaled[:4]) or 1}."
    lowest, highest = map(float, quotient.aminmax())
    half = ", which looks like half precision" if max(abs(lowest - 1), abs(highest - 1)) < HALF else ""
    return f"{text} {lowest:.4g} to {highest:.4g} times what it should be{half}."


# -- what goes into it -------------------------------------------------------------------------------------------------


def _centred(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """``(S,)`` each: the values minus the mean of their group, and the standard deviation of the group."""
    count = torch.bincount(group)
    centred = values - (summed(values, group, len(count)) / count)[group]
    return centred, (summed(centred.square(), group, len(count)) / (count - 1).clamp(min=1)).sqrt()[group]


def _advantages(steps: Sequence[Step]) -> Iterator[str]:
    """Advantages that are not those that TRL makes of the rewards, in groups that are complete."""
    for step in steps:
        loss, rewards = loss_of(step), step.tensors.get("rewards")
        settings = {} if loss is None else loss.settings
        summed_first = settings.get("multi_objective_aggregation", "sum_then_normalize") == "sum_then_normalize"
        kind, size = settings.get("scale_rewards") if summed_first else "", settings.get("num_generations", 0)
        if kind not in ("group", "none") or not 0 < size < 10**6 or rewards is None or "group_ids" not in step.tensors:
            continue
        centred, deviation = _centred(rewards.double(), step.groups)
        divisor = deviation + 1e-4 if kind == "group" else torch.ones_like(deviation)
        expected, recorded = centred / divisor, advantage_of(step)
        is_complete = (torch.bincount(step.groups) == torch.tensor(size))[step.groups] & (step.tensors["lengths"] > 0)
        is_compared = is_complete & expected.isfinite()  # an unknown reward makes all of its group unknown
        # if rewards are equal, the rounding of their mean in float32 gives advantages of up to this size
        rounding = ROUNDING * rewards.double().abs() / divisor
        largest = max(float(expected[is_compared].abs().max()) if bool(is_compared.any()) else 0.0, 1e-3)
        difference = (recorded - expected).abs().where(is_compared, torch.zeros(()).double())
        if bool((difference > 1e-4 * largest + rounding).any()):
            worst = int(difference.argmax())
            yield (
                f"Its advantages in step {step.number} are not those of its rewards, with scale_rewards '{kind}': that "
                f"of response {worst} is {recorded[worst]:.4g} in place of {expected[worst]:.4g}."
            )
            return


def _overflows(steps: Sequence[Step]) -> Iterator[str]:
    for step in steps:
        count = int((~step.tensors.get("coefficients", torch.zeros(0)).isfinite()).sum())
        count += sum(value is None for value in step.header.loss.values) if step.header.loss else 0
        if count:
            yield f"What was backpropagated in step {step.number} has {count} values that are NaN or Inf."


def _movement(steps: Sequence[Step]) -> Iterator[str]:
    """The still test: if no weight has moved since the responses were sampled, every ratio is 1."""
    for index, step in enumerate(steps):
        old = step.tensors.get("old_logprobs")
        is_resting = all(previous.header.learning_rate == 0 for previous in steps[: index + 1])
        if old is None or not (step.header.first or is_resting) or not bool(step.mask.any()):
            continue
        distance = (step.live_logprobs - old).abs()[step.mask]
        mean, outside = float(distance.mean()), float((distance > math.log(1.2)).double().mean())
        sampled = step.tensors.get("rollout_logprobs")
        is_sampler = sampled is not None and bool((old == sampled)[step.mask].all())
        if mean > (STILL / 10 if is_sampler else STILL) or outside > STILL:
            yield (
                f"In step {step.number} the policy had moved before any step: the log-ratio is {mean:.3g} nats "
                f"from 0 on average, and {outside:.1%} of the tokens have a ratio outside of 0.83 to 1.2."
                + " The log-probs in the denominator are those of the sampler, to the last bit."
                * is_sampler
            )
            return
