"""What a pass over the vocabulary is asked for, and the record it gives back."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor


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


#: In the order in which the autograd functions return them.
ORDER = tuple(one.name for one in fields(TokenSignals))
#: What one pass over the vocabulary can give.
SIGNAL_NAMES = frozenset(ORDER)
#: All that the trainer that ships makes for a method: these, what its sampler knows, and a reference model's.
TRAINER_SIGNALS = SIGNAL_NAMES | {"ref_logprobs", "rollout_logprobs", "truncated", "branch"}


@dataclass(frozen=True, eq=False)
class Ask:
    """What a pass has to compute, and how much of it at a time.

    Attributes:
        needs: names of signals.
        min_p: defines ``log_kept_mass``.
        kept_rows: ``(N,)`` bool, the rows on which ``log_kept_mass`` is needed; None for all.
        rows, columns: the largest tile of logits that is held.
    """

    needs: frozenset[str]
    min_p: float | None
    kept_rows: Tensor | None
    rows: int
    columns: int
