"""Per-token signals of the next-token distribution: log-prob, entropy, max log-prob, kept mass, sum of squares.

The only place where a vocabulary is touched. Everything downstream sees ``(N,)`` float32 fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlstab.core.errors import MissingSignal, OutOfRange, ShapeError

#: Rows of the vocabulary head that are held at a time.
ROWS = 1024


@dataclass(frozen=True, eq=False)
class TokenSignals:
    """One ``(N,)`` float32 (float64 for float64 inputs) field per signal that was asked for; nats.

    ``log_kept_mass`` is the log of the mass on the tokens whose probability is at least ``min_p`` times that of the
    likeliest one; the kept set is a decision and carries no gradient. ``max_logprobs`` carries none either.
    """

    logprobs: Tensor | None = None
    entropies: Tensor | None = None
    max_logprobs: Tensor | None = None
    log_kept_mass: Tensor | None = None
    sum_p_sq: Tensor | None = None


SIGNAL_NAMES = frozenset(one.name for one in fields(TokenSignals))


def token_signals(
    hidden: Tensor,
    head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    needs: Set[str] = frozenset({"logprobs", "entropies"}),
    bias: Tensor | None = None,
    min_p: float | None = None,
    rows: Mapping[str, Tensor] | None = None,
) -> TokenSignals:
    """Signals from hidden states and the weight of the vocabulary head, without ever holding ``(N, V)`` logits.

    Args:
        hidden: ``(N, d)``, differentiable.
        head_weight: ``(V, d)``, differentiable.
        token_ids: ``(N,)`` int64, the tokens whose log-prob is wanted.
        temperature: divides the logits.
        needs: names of the fields to compute; nothing else is.
        bias: ``(V,)`` of the head, or None.
        min_p: defines ``log_kept_mass``.
        rows: for a name, the ``(N,)`` bool of rows on which it is needed; it is 0 elsewhere.

    Raises:
        ShapeError: shapes do not fit.
        MissingSignal: no such signal.
        OutOfRange: temperature not positive, or ``log_kept_mass`` without a ``min_p`` in (0, 1].
    """
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise ShapeError(
            f"token_signals: hidden is {tuple(hidden.shape)} and head_weight {tuple(head_weight.shape)}; expected "
            f"(N, d) and (V, d)."
        )

    def logits(part: Tensor) -> Tensor:
        return torch.nn.functional.linear(part, head_weight, bias)

    return _in_chunks(logits, hidden, token_ids, temperature, needs, min_p, rows)


def token_signals_from_logits(
    logits: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    needs: Set[str] = frozenset({"logprobs", "entropies"}),
    min_p: float | None = None,
    rows: Mapping[str, Tensor] | None = None,
) -> TokenSignals:
    """Signals from ``(N, V)`` logits that somebody already made. See :func:`token_signals`."""
    if logits.ndim != 2:
        raise ShapeError(f"token_signals_from_logits: logits are {tuple(logits.shape)}, expected (N, V).")
    return _in_chunks(lambda part: part, logits, token_ids, temperature, needs, min_p, rows)


def _in_chunks(
    logits: Callable[[Tensor], Tensor],
    source: Tensor,
    token_ids: Tensor,
    temperature: float,
    needs: Set[str],
    min_p: float | None,
    rows: Mapping[str, Tensor] | None,
) -> TokenSignals:
    _check(source, token_ids, temperature, needs, min_p)
    names = sorted(needs)
    rows = rows or {}

    def chunk(part: Tensor, ids: Tensor, *where: Tensor) -> tuple[Tensor, ...]:
        values = logits(part)
        values = values if values.dtype == torch.float64 else values.float()
        # one line a name: a chunk is one small log-softmax, and each signal a reduction over it
        return _signals(
            torch.log_softmax(values / temperature, dim=-1), ids, names, min_p, dict(zip(rows, where, strict=True))
        )

    parts = []
    for start in range(0, max(source.shape[0], 1), ROWS):
        span = slice(start, start + ROWS)
        arguments = (source[span], token_ids[span], *(mask[span] for mask in rows.values()))
        if torch.is_grad_enabled() and source.shape[0] > ROWS:
            parts.append(checkpoint(chunk, *arguments, use_reentrant=False))
        else:
            parts.append(chunk(*arguments))
    return TokenSignals(**{name: torch.cat(one) for name, one in zip(names, zip(*parts, strict=True), strict=True)})


def _check(source: Tensor, token_ids: Tensor, temperature: float, needs: Set[str], min_p: float | None) -> None:
    unknown = sorted(needs - SIGNAL_NAMES)
    if unknown:
        raise MissingSignal(f"no signal is called '{unknown[0]}'. Known: {', '.join(sorted(SIGNAL_NAMES))}.")
    if token_ids.shape != source.shape[:1]:
        raise ShapeError(f"{source.shape[0]} rows and token_ids of shape {tuple(token_ids.shape)}; expected (N,).")
    if not temperature > 0:
        raise OutOfRange(f"temperature = {temperature!r}, expected a number above 0.")
    if "log_kept_mass" in needs and not (min_p is not None and 0 < min_p <= 1):
        raise OutOfRange(f"log_kept_mass needs min_p in (0, 1], not {min_p!r}.")


def _signals(
    logprobs: Tensor, token_ids: Tensor, names: list[str], min_p: float | None, rows: Mapping[str, Tensor]
) -> tuple[Tensor, ...]:
    """One ``(n,)`` tensor a name from ``(n, V)`` log-probs."""
    laws: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
        "logprobs": lambda logp, ids: logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1),
        "entropies": lambda logp, _: _entropy(logp),
        "max_logprobs": lambda logp, _: logp.detach().amax(-1),
        "log_kept_mass": lambda logp, _: _kept_mass(logp, min_p or 1.0),
        "sum_p_sq": lambda logp, _: logp.exp().square().sum(-1),
    }

    def over(name: str) -> Tensor:
        if name not in rows:
            return laws[name](logprobs, token_ids)
        where = rows[name]
        empty = torch.zeros(logprobs.shape[0], dtype=logprobs.dtype, device=logprobs.device)
        return empty.masked_scatter(where, laws[name](logprobs[where], token_ids[where]))

    return tuple(map(over, names))


def _entropy(logprobs: Tensor) -> Tensor:
    # a forbidden token has log-prob -inf, and 0 * inf is NaN; below -1e4 the probability is 0 in every dtype
    return -(logprobs.exp() * logprobs.clamp(min=-1e4)).sum(-1)


def _kept_mass(logprobs: Tensor, min_p: float) -> Tensor:
    fixed = logprobs.detach()
    kept = fixed >= fixed.amax(-1, keepdim=True) + math.log(min_p)
    return logprobs.masked_fill(~kept, -torch.inf).logsumexp(-1)
