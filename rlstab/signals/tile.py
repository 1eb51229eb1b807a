"""What a pass is asked for and gives back, and the arithmetic on one tile of logits that both passes share.

A row of logits ``x`` is looked at relative to its largest, ``y = x - top`` and ``e = exp(y)``: no overflow, and no
cancellation in ``log p = y - log_sum``, where ``log_sum = log sum e``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rlstab.core.devices import sent
from rlstab.errors import RlstabError
from rlstab.signals.support import log_mass, log_total, members, shares


@dataclass(frozen=True, eq=False)
class TokenSignals:
    """One ``(N,)`` float32 (float64 for float64 inputs) field per signal that was asked for; nats.

    ``log_kept_mass`` is the log of the mass on the tokens whose probability is at least ``min_p`` times that of the
    likeliest one; the kept set is a decision and carries no gradient. ``max_logprobs`` carries none either.
    ``teacher_divergence`` is defined in :mod:`rlstab.signals.divergence`.
    ``log_support_mass`` is the log of the mass on the tokens that the sampler kept (:mod:`rlstab.signals.support`).
    """

    logprobs: Tensor | None = None
    entropies: Tensor | None = None
    max_logprobs: Tensor | None = None
    log_kept_mass: Tensor | None = None
    sum_p_sq: Tensor | None = None
    teacher_divergence: Tensor | None = None
    log_support_mass: Tensor | None = None


#: In the order in which the autograd functions return them.
ORDER = tuple(signal.name for signal in fields(TokenSignals))
#: What one pass over the vocabulary can give of the policy alone.
SIGNAL_NAMES = frozenset(ORDER) - {"teacher_divergence"}
#: All that rlstab's trainer computes for a method: these, what its sampler and scorer know, and others' log-probs.
TRAINER_SIGNALS = SIGNAL_NAMES | {
    *("ref_logprobs", "teacher_logprobs", "rollout_logprobs", "truncated", "branch", "lag", "rewards", "raw_rewards"),
    *("turn", "turn_reward"),
}


@dataclass(frozen=True, eq=False)
class Ask:
    """What a pass has to compute, and how much of it at a time.

    Attributes:
        needs: names of signals.
        min_p: defines ``log_kept_mass``.
        kept_rows: ``(N,)`` bool, the rows on which ``log_kept_mass`` is needed; None for all.
        support: ``(N, K)``, defines ``log_support_mass``.
        rows, columns: the largest tile of logits that is held.
        target: what ``teacher_divergence`` compares with.
    """

    needs: frozenset[str]
    min_p: float | None
    kept_rows: Tensor | None
    rows: int
    columns: int
    support: Tensor | None = None
    target: Target | None = None

    def height(self, vocab: int) -> int:
        """How many whole rows fit: a large vocabulary allows fewer."""
        return max(1, min(self.rows, self.rows * self.columns // max(vocab, 1)))


class Target(Protocol):
    """The distribution of a teacher at each row. Slices are of rows or of the vocabulary."""

    @property
    def kept(self) -> int:
        """How many numbers of a row the backward reads."""

    def measure(self, policy: Tensor, span: slice, buffers: Buffers) -> tuple[Tensor, Tensor]:
        """``(n,)`` divergence, and the ``(n, kept)`` numbers, from ``(n, V)`` log-probs, which it spoils."""

    def pull(self, policy: Tensor, kept: Tensor, span: slice, columns: slice, buffers: Buffers) -> Tensor:
        """``(n, columns)`` gradient with respect to the policy's logits, from its log-probs, which it spoils."""

    def pick(self, index: Tensor) -> Target:
        """The same for some of the rows."""


#: A forbidden token has log-prob -inf, and 0 * inf is NaN; at this one the probability is 0 in every dtype.
FLOOR = -1e4


#: Among the values of a pass with a teacher, what its backward reads.
KEPT = "teacher/kept"


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Rows:
    """What a forward finds: the signals by name, and the two numbers per row that let a backward make ``p`` again."""

    values: dict[str, Tensor]
    top: Tensor
    log_sum: Tensor
    support: Tensor | None = None

    @classmethod
    def empty(cls, count: int, needs: frozenset[str], like: Tensor) -> Rows:
        def field() -> Tensor:
            return torch.zeros(count, dtype=wide(like.dtype), device=like.device)

        return cls({name: field() for name in ORDER if name in needs}, field(), field())

    @classmethod
    def saved(cls, names: Sequence[str], tensors: Sequence[Tensor], support: Tensor | None) -> Rows:
        """From what a forward saved: ``top``, ``log_sum``, and the values of these names."""
        return cls(dict(zip(names, tensors[2:], strict=True)), tensors[0], tensors[1], support)

    def pick(self, index: Tensor) -> Rows:
        """The same for some of the rows."""
        values = {name: values[index] for name, values in self.values.items()}
        support = None if self.support is None else self.support[index]
        return Rows(values, self.top[index], self.log_sum[index], support)

    def pull(
        self, target: Target, slope: Tensor, span: slice, columns: slice, logits: Tensor, buffers: Buffers
    ) -> Tensor:
        """``slope`` ``(n,)`` times the gradient of ``teacher_divergence`` on a tile of logits, in a buffer."""
        policy = self.logprobs(span, logits, buffers)
        return target.pull(policy, self.values[KEPT][span], span, columns, buffers).mul_(slope[span].unsqueeze(1))

    def logprobs(self, span: slice, logits: Tensor, buffers: Buffers) -> Tensor:
        """The log-probs of a tile of logits, in a buffer."""
        shifted = torch.sub(logits, self.top[span].unsqueeze(1), out=buffers.take("policy", *logits.shape))
        return shifted.sub_(self.log_sum[span].unsqueeze(1))

    def outputs(self, ctx: Any) -> tuple[Tensor | None, ...]:
        """In the order of the record; the likeliest token's log-prob is declared without a gradient."""
        if "max_logprobs" in self.values:
            ctx.mark_non_differentiable(self.values["max_logprobs"])
        return tuple(self.values.get(name) for name in ORDER)


def whole_rows(logits_of: Callable[[slice], Tensor], like: Tensor, vocab: int, ids: Tensor, ask: Ask) -> Rows:
    """The signals from whole rows of logits, as many at a time as fit: where a row fits, nothing has to run.

    Args:
        logits_of: makes the ``(n, vocab)`` logits of some rows.
        like: ``(N, ...)``, of the device and dtype from which the logits are made.
        vocab: the number of logits in a row.
        ids: ``(N,)`` int64.
        ask: what to compute.
    """
    rows, height = Rows.empty(like.shape[0], ask.needs, like), ask.height(vocab)
    values, teacher_buffers = rows.values, Buffers(like, min(height, like.shape[0]) * vocab)
    if ask.target is not None:
        values[KEPT] = rows.top.new_empty(like.shape[0], ask.target.kept)
    for span in spans(like.shape[0], height):
        logits = logits_of(span)
        logprobs = torch.log_softmax(logits, dim=-1)
        best = logprobs.amax(-1)
        rows.top[span], rows.log_sum[span] = logits.amax(-1), -best
        if "logprobs" in values:
            values["logprobs"][span] = logprobs.gather(-1, ids[span].unsqueeze(-1)).squeeze(-1)
        if "entropies" in values:
            values["entropies"][span] = -(logprobs.exp() * logprobs.clamp(min=FLOOR)).sum(-1)
        if "max_logprobs" in values:
            values["max_logprobs"][span] = best
        if "sum_p_sq" in values:
            values["sum_p_sq"][span] = logprobs.exp().square().sum(-1)
        if "log_kept_mass" in values:
            where = slice(None) if ask.kept_rows is None else sent(ask.kept_rows[span].nonzero().squeeze(1), ids.device)
            likely = logprobs[where] >= best[where].unsqueeze(-1) + math.log(ask.min_p or 1.0)
            values["log_kept_mass"][span][where] = logprobs[where].masked_fill(~likely, -torch.inf).logsumexp(-1)
        if "log_support_mass" in values and ask.support is not None:
            total = log_total(logprobs, ask.support[span])
            values["log_support_mass"][span] = log_mass(total, torch.zeros_like(total), ask.support[span])
        if ask.target is not None:
            policy = rows.logprobs(span, logits, teacher_buffers)
            measured = ask.target.measure(policy, span, teacher_buffers)
            values["teacher_divergence"][span], values[KEPT][span] = measured
    return rows


def kept(shifted: Tensor, top: Tensor, min_p: float) -> Tensor:
    """The tokens near the likeliest one, in logits that were made a second time.

    A second product may round another way, so that the likeliest token itself comes out a hair below its own maximum.
    """
    slack = 32 * torch.finfo(top.dtype).eps * top.abs().clamp(min=1.0)
    return shifted >= slack.neg().clamp(max=math.log(min_p)).unsqueeze(-1)


@dataclass(frozen=True)
class Slope:
    """The gradient of any signals with respect to the logits: one polynomial per row.

    ``e * (const + linear * y + square * e + kept * [y is kept]) + target * [the row's own token]``. Another signal is
    another coefficient, ``(n,)`` numbers, and not another pass over the vocabulary; ``support`` is that of the tokens
    in ``members``, whose probabilities are relative to ``level``.
    """

    top: Tensor
    min_p: float
    const: Tensor
    linear: Tensor | None = None
    square: Tensor | None = None
    kept: Tensor | None = None
    target: Tensor | None = None
    support: Tensor | None = None
    level: Tensor | None = None
    members: Tensor | None = None

    @classmethod
    def of(cls, grads: Mapping[str, Tensor], rows: Rows, scale: float | Tensor, min_p: float) -> Slope:
        """From the incoming gradients ``(n,)``; ``scale`` is d logit / d what is asked for."""
        values, const = rows.values, torch.zeros_like(rows.log_sum)
        terms: dict[str, Tensor] = {}
        inverse = (-rows.log_sum).exp()  # p = e * inverse
        if "logprobs" in grads:
            terms["target"] = grads["logprobs"]
            const -= grads["logprobs"]
        if "entropies" in grads:  # dH / dx = -p (log p + H)
            g = grads["entropies"]
            terms["linear"] = -g * inverse
            const += g * (rows.log_sum - values["entropies"])
        if "sum_p_sq" in grads:  # dS / dx = 2 p (p - S)
            g = 2 * grads["sum_p_sq"]
            terms["square"] = g * inverse.square()
            const -= g * values["sum_p_sq"]
        if "log_kept_mass" in grads:  # d log Z / dx = p ([kept] / Z - 1)
            g = grads["log_kept_mass"]
            terms["kept"] = g * (-values["log_kept_mass"]).exp() * inverse
            const -= g
        level = None
        if "log_support_mass" in grads and rows.support is not None:
            terms["support"] = torch.where((rows.support >= 0).any(1), grads["log_support_mass"], 0.0)
            const -= terms["support"]
            level = values["log_support_mass"] + rows.log_sum
        terms["const"] = const * inverse
        scaled = {name: term * scale for name, term in terms.items()}
        return cls(rows.top, min_p, **scaled, level=level, members=rows.support)

    def __getitem__(self, span: slice) -> Slope:
        parts: dict[str, Any] = {name: part[span] for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **parts)

    def of_tile(self, logits: Tensor, ids: Tensor, first: int, out: Tensor) -> Tensor:
        """Write the gradient of a tile whose vocabulary starts at ``first`` into ``out``; spoils ``logits``."""
        shifted = logits.sub_(self.top.unsqueeze(1))
        likely = None if self.kept is None else kept(shifted, self.top, self.min_p)
        drawn = None
        if self.support is not None and self.level is not None and self.members is not None:
            drawn = shares(shifted, self.level, self.members, first)
        e = torch.exp(shifted, out=out)
        weight = self.const.unsqueeze(1)
        if self.linear is not None:
            weight = shifted.clamp_(min=FLOOR).mul_(self.linear.unsqueeze(1)).add_(weight)
        elif self.square is not None or self.kept is not None:
            weight = shifted.copy_(weight.expand_as(shifted))
        if self.square is not None:
            weight.addcmul_(e, self.square.unsqueeze(1))
        if self.kept is not None and likely is not None:
            weight.add_(likely * self.kept.unsqueeze(1))
        e.mul_(weight)
        if drawn is not None and self.support is not None:
            e.scatter_add_(1, drawn[0], drawn[1] * self.support.unsqueeze(1))
        if self.target is not None:
            column, in_tile = members(ids.unsqueeze(1), first, logits.shape[1])
            e.scatter_add_(1, column, torch.where(in_tile, self.target.unsqueeze(1), 0.0))
        return e


def live_rows(grads: Mapping[str, Tensor], count: int, device: torch.device) -> Tensor:
    """Indices of the rows with a gradient to pass on. NaN is a gradient too: it must stay visible."""
    live = torch.zeros(count, dtype=torch.bool, device=device)
    for grad in grads.values():
        live |= grad != 0
    return live.nonzero().squeeze(1)


def spans(count: int, height: int) -> Iterator[slice]:
    """Slices of at most ``height`` of ``count`` rows."""
    return (slice(start, min(start + height, count)) for start in range(0, count, height))


def incoming(grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The gradients that arrived, by name."""
    return {name: grad for name, grad in zip(ORDER, grads, strict=True) if grad is not None}


@dataclass
class Buffers:
    """Storage for tiles, made once a pass: fresh memory of this size is paid for page by page."""

    like: Tensor
    size: int
    held: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """A ``(rows, columns)`` view of the buffer of this name, uninitialised."""
        if name not in self.held:
            self.held[name] = torch.empty(self.size, dtype=dtype or wide(self.like.dtype), device=self.like.device)
        return self.held[name][: rows * columns].view(rows, columns)


class Once(torch.autograd.Function):
    """A gradient that knows what it was made of, in order to refuse the second derivative instead of losing it."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> Tensor:
        """The gradient itself."""
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        """There is none."""
        raise RlstabError(
            "token signals have a first derivative only (no create_graph=True). Take log_softmax of logits for more."
        )


def once(gradients: Sequence[Tensor | None], parents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients as a backward has to return them: under ``create_graph`` their own backward is an error."""
    if not torch.is_grad_enabled():
        return tuple(gradients)
    return tuple(
        None if gradient is None else Once.apply(gradient, *parents)  # type: ignore[no-untyped-call]  # torch's apply has no types
        for gradient in gradients
    )
