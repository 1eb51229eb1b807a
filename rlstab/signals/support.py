"""The support of the sampler: the tokens that top-p or top-k left it to draw from, and the policy's mass on them.

A support is ``(..., K)`` whole numbers: the distinct ids of the tokens that were kept, padded with -1. A token without
an id was drawn from the whole vocabulary, on which the mass is 1.

With S the support, ``log M = log sum_{j in S} p_j``, and for the logits x ``d log M / dx_j = p_j ([j in S] / M - 1)``.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlstab.errors import OutOfRange, ShapeError


def as_support(tokens: Tensor, *, counts: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
    """``(N, K)`` int64 support of N tokens, from the forms in which samplers hand it over.

    Args:
        tokens: ``(N, K)`` ids, padded with a negative number; ``(N, V)`` bool, True on the tokens that were kept; or
            ``(m,)`` ids of all tokens, one token after another, with ``counts`` or ``offsets``.
        counts: ``(N,)`` ids of each token, as in prime-rl's ``SamplingMask``; 0 is the whole vocabulary.
        offsets: ``(N + 1,)`` where the ids of each token begin, as in vLLM's ``SamplingMask``.

    Raises:
        ShapeError: the shapes do not fit, or the counts do not add up.
        OutOfRange: a token was kept twice.
    """
    if offsets is not None:
        counts = offsets.diff()
    if tokens.dtype == torch.bool and tokens.ndim == 2:
        counts, tokens = tokens.sum(1), tokens.nonzero()[:, 1]
    support = tokens
    if counts is not None:
        if tokens.ndim != 1 or counts.ndim != 1 or int(counts.sum()) != tokens.numel() or bool((counts < 0).any()):
            raise ShapeError(
                f"as_support: the tokens have shape {tuple(tokens.shape)}, and the counts add up to "
                f"{int(counts.sum())}. Give (m,) ids with counts or offsets of all m."
            )
        ids = tokens.long().cpu().split(counts.tolist())
        support = pad_sequence(list(ids), True, -1.0).to(tokens.device) if ids else tokens.new_zeros(0, 0)
    if support.ndim != 2 or support.is_floating_point():
        raise ShapeError(
            f"as_support: tokens is {tokens.dtype} of shape {tuple(tokens.shape)}, expected (N, K) token ids."
        )
    ordered = support.long().clamp(min=-1).sort(1).values
    if bool(((ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)).any()):
        raise OutOfRange(
            "as_support: a token was kept twice, and its probability would count twice. Give distinct ids."
        )
    return support.long().clamp(min=-1)


def drawn_from(logits: Tensor, top_p: float, top_k: int) -> Tensor:
    """``(n, K)`` the support of each row, in the order of probability.

    The ``top_k`` likeliest tokens (0 for all), and of these the fewest with a share ``top_p`` of their mass, as vLLM.
    """
    best = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    probabilities = best.values.double().softmax(-1)
    mask = probabilities.cumsum(-1) - probabilities < top_p  # the first token is always kept
    return best.indices.masked_fill(~mask, -1)[:, : int(mask.sum(-1).amax()) if len(mask) else 0]


def only(logits: Tensor, support: Tensor) -> Tensor:
    """The ``(n, V)`` logits of the tokens in the support, -inf for all others."""
    ids = torch.where(support >= 0, support, support[:, :1])  # padding repeats the likeliest, which is kept
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, logits.gather(1, ids))


def members(support: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """``(n, K)`` columns of tokens in a tile of the vocabulary, and whether each is in this tile."""
    local = support.long() - first
    return local.clamp(0, width - 1), (local >= 0) & (local < width)


def log_total(logits: Tensor, support: Tensor, first: int = 0) -> Tensor:
    """``(n,)`` log of the sum of ``exp(logit)`` over the part of the support in a tile; -inf without such a part."""
    column, mask = members(support, first, logits.shape[1])
    return logits.gather(1, column).masked_fill(~mask, -torch.inf).logsumexp(1)


def log_mass(total: Tensor, log_sum: Tensor, support: Tensor) -> Tensor:
    """``(n,)`` log of the mass, from the logs of the sums over support and vocabulary; 0 for a whole vocabulary."""
    return torch.where((support >= 0).any(1), total - log_sum, 0.0)


def shares(shifted: Tensor, level: Tensor, support: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """``(n, K)`` columns of the support in a tile, and p_j / M there; ``level`` is the log of M times the sum."""
    column, mask = members(support, first, shifted.shape[1])
    return column, torch.where(mask, (shifted.gather(1, column) - level.unsqueeze(1)).exp(), 0.0)
