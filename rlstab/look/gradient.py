"""Where the gradient of a run goes: into which tokens, responses and positions, and why others have none."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstab.errors import RlstabError
from rlstab.look.host_loss import summed, terms_of
from rlstab.look.recorded_loss import loss_of
from rlstab.record import Step, Trace, trace
from rlstab.record.effects import recorded
from rlstab.record.step import DID

#: Tokens that are listed one by one.
LISTED = 10
#: Bins of positions, over the longest response.
BINS = 20


def pulls(step: Step, coefficients: Tensor) -> Tensor:
    """``(n,)`` float64, how far the step pulls the logit of each token: its coefficient times (1 - p).

    Args:
        step: a step of a dump.
        coefficients: ``(n,)`` minus the derivative of a loss by the log-prob of each token.
    """
    return coefficients.double() * -torch.expm1(step.batch.logprobs.double().clamp(max=0))


@dataclass(frozen=True)
class Token:
    """One token with a large share of the gradient.

    Attributes:
        step: index of the optimizer step in the dump.
        response, position: indices of the response in its step and of the token in its response.
        share: its share of the gradient; below 0 where the step makes the token less likely.
    """

    step: int
    response: int
    position: int
    share: float


@dataclass(frozen=True)
class Gradient:
    """Shares are of the sum of ``|coefficient| (1 - p)`` over all tokens of a dump, or of the tokens.

    Attributes:
        tokens: the number of tokens that count in the loss.
        rare_below: the probability below which a token is rare: exp of minus the mean entropy, or surprisal.
        quadrants: shares of the gradient and of the tokens, by ``rewarded`` or ``punished`` and ``rare`` or ``common``.
        half_tokens, half_groups, groups: tokens and groups of responses that have half of it, and all groups.
        without: the share of the tokens without a gradient, by reason.
        positions: the share of the gradient and of the tokens in each of :data:`BINS` bins.
        bin_width: positions of a bin, tokens.
        turns: the same shares for each turn of the conversation; empty if each response is one turn.
        largest: the :data:`LISTED` tokens with the largest shares.
    """

    tokens: int
    rare_below: float
    quadrants: Mapping[tuple[str, str], tuple[float, float]]
    half_tokens: int
    half_groups: int
    groups: int
    without: Mapping[str, float]
    positions: Sequence[tuple[float, float]]
    bin_width: int
    turns: Sequence[tuple[float, float]]
    largest: Sequence[Token]


def gradient_of(steps: Sequence[Step], shares: Sequence[Tensor]) -> Gradient | None:
    """Where the gradient goes; None if no token has one.

    Args:
        steps: the steps of a dump.
        shares: see :func:`shares_of`.
    """
    sizes = torch.cat([share.abs() for share in shares])
    if not float(sizes.sum()):
        return None
    batches = [step.batch for step in steps]
    advantages = torch.cat([batch.advantages for batch in batches])
    surprisals = [-batch.logprobs if batch.entropies is None else batch.entropies for batch in batches]
    rare_below = float(torch.cat(surprisals).double().nanmean().clamp(min=0).neg().exp())
    rare = torch.cat([batch.logprobs for batch in batches]).exp() < rare_below
    sides = {"rewarded": advantages > 0, "punished": advantages < 0}
    quadrants = {
        (side, kind): (float(sizes[where & of_kind].sum()), float((where & of_kind).double().mean()))
        for side, where in sides.items()
        for kind, of_kind in {"rare": rare, "common": ~rare}.items()
    }
    positions = torch.cat([batch.position for batch in batches])
    width = -(-(int(positions.max()) + 1) // BINS)
    bins = positions // width
    by_position, counts = _shares(bins, sizes, BINS)
    turn = torch.cat([step.turns for step in steps])
    groups: Counter[tuple[int, int]] = Counter()
    for number, (batch, share) in enumerate(zip(batches, shares, strict=True)):
        names, index = batch.group_ids[batch.sequence].unique(return_inverse=True)
        sums = summed(share.abs(), index, len(names))
        groups.update({(number, name): size for name, size in zip(names.tolist(), sums.tolist(), strict=True)})
    return Gradient(
        tokens=len(sizes),
        rare_below=rare_below,
        quadrants=quadrants,
        half_tokens=_half(sizes),
        half_groups=_half(torch.tensor(list(groups.values()), dtype=torch.float64)),
        groups=len(groups),
        without=_without(steps, shares),
        positions=list(zip(by_position, counts, strict=True)),
        bin_width=width,
        turns=list(zip(*_shares(turn, sizes, 0), strict=True)) if bool(turn.any()) else [],
        largest=list(_largest(steps, torch.cat(list(shares)))),
    )


def _shares(bins: Tensor, sizes: Tensor, count: int) -> Iterator[list[float]]:
    """By bin, the share of the gradient and of the tokens."""
    yield torch.bincount(bins, sizes, count).tolist()
    yield (torch.bincount(bins, minlength=count).double() / len(bins)).tolist()


def shares_of(steps: Sequence[Step]) -> list[Tensor]:
    """``(n,)`` float64 by step: the signed share of each token in the gradient of all steps together."""
    pulled = [pulls(step, run_coefficients(step)) for step in steps]
    total = sum(float(pull.abs().sum()) for pull in pulled)
    return [pull / total if total else pull for pull in pulled]


def traces_of(step: Step) -> Iterator[tuple[Step, Trace]]:
    """What the loss of the trainer did to each token, as recorded or planned again from the evidence.

    Yields:
        the step and its trace; or its micro-batches, if the trainer took statistics from each of them. If the
        loss is unknown, traces have no methods.

    Raises:
        RlstabError: the objective does not fit the evidence.
    """
    loss = loss_of(step)
    if loss is None or loss.objective is None or any(name.startswith(DID) for name in step.tensors):
        yield step, recorded(step)
        return
    parts = [step.only(rows) for _, rows in step.micro_batches()] if loss.scope == "microbatch" else [step]
    plan = loss.plan([part.batch for part in parts])
    yield from ((part, trace(plan, number, part.live)) for number, part in enumerate(parts))


def run_coefficients(step: Step) -> Tensor:
    """``(n,)`` float64, minus the coefficients of the run's loss: as recorded, by its formula, or those of a plain
    loss.
    """
    if "coefficients" in step.tensors:
        return -step.tensors["coefficients"][step.mask].double()
    loss = loss_of(step)
    if loss is None:  # REINFORCE with a mean over tokens
        return step.batch.advantages.double() / max(len(step.batch), 1)
    return -terms_of(loss, step, "gradient").sum(1)[step.mask]


def _half(sizes: Tensor) -> int:
    """The number of largest values that make up half of the sum."""
    behind = sizes.sort(descending=True).values.cumsum(0)
    return int((behind < behind[-1] / 2).sum()) + 1


def _without(steps: Sequence[Step], shares: Sequence[Tensor]) -> dict[str, float]:
    """By reason: an advantage of 0 comes before what methods did, for such a token pulls nowhere whatever they do."""
    counts: Counter[str] = Counter()
    for step, share in zip(steps, shares, strict=True):
        batch, weights = step.batch, step.tensors.get("weights")
        left = share == 0
        rejected = torch.zeros_like(left) if weights is None else weights[step.mask] == 0
        reasons = {"zero advantage": batch.advantages == 0, "rejected by the correction": rejected, **_did(step)}
        for reason, where in reasons.items():
            counts[reason] += int((left & where).sum())
            left = left & ~where
        counts["another reason"] += int(left.sum())
    tokens = sum(map(len, shares))
    return {reason: count / tokens for reason, count in counts.items() if count}


def _did(step: Step) -> dict[str, Tensor]:
    """``(n,)`` bool: tokens that the trainer's own loss clipped, or that one of its methods dropped."""
    if step.header.loss is None:
        return {}
    try:
        traced = list(traces_of(step))
    except RlstabError:
        return {}
    if len(traced) > 1:  # micro-batches, whose tokens are those of the step in another order
        return {}
    (_, effects), *_ = traced
    dropped = {"beyond the clip range": effects.clipped}
    for method in effects.methods.values():
        if method.weight is not None:
            dropped[f"weight 0 by {method.name}"] = method.weight == 0
        if "dropped" in method.actions:
            dropped[f"dropped by {method.name}"] = method.actions["dropped"]
    return dropped


def _largest(steps: Sequence[Step], shares: Tensor) -> Iterator[Token]:
    starts = torch.tensor([0, *(len(step.batch) for step in steps)]).cumsum(0)
    for index in shares.abs().topk(min(LISTED, len(shares))).indices.tolist():
        number = int(torch.searchsorted(starts, index, right=True)) - 1
        within = index - int(starts[number])
        batch, step = steps[number].batch, steps[number]
        response = int(batch.sequence[within])
        # the index among all tokens of the response, including those that do not count in the loss
        position = int(step.mask.nonzero()[within]) - int((step.row < response).sum())
        yield Token(number, response, position, float(shares[index]))
