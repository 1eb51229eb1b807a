"""The counts of tokens and sequences over all parts and ranks, by which the terms of the loss are divided.

The policy term is divided by those of kept tokens, each penalty by those of all.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm
from rlstab.core.devices import on_cpu
from rlstab.core.loss import Part
from rlstab.errors import OutOfRange


def counts(batch: TokenBatch, where: Tensor | None) -> Tensor:
    """``(2,)`` float64 on the device of the tokens: those that count, and sequences with at least one such token."""
    if where is None:
        tokens = torch.full((), len(batch), dtype=torch.float64, device=batch.sequence.device)
        return torch.stack([tokens, batch.lengths.count_nonzero().double()])
    marks = where.float()
    marked = torch.zeros(batch.num_sequences, device=marks.device).scatter_reduce_(0, batch.sequence, marks, "amax")
    return torch.stack([where.count_nonzero(), marked.count_nonzero()]).double()


class Counts(NamedTuple):
    """Counts over one part, or over all parts.

    Attributes:
        kept_tokens, kept_sequences: tokens that are kept, and sequences with at least one kept token.
        tokens, sequences: all tokens, and all sequences.
        live: tokens whose policy term can have a gradient.
        penalised: tokens under a penalty with a coefficient, summed over penalties.
        invalid: values of the terms that are not allowed in a loss.
    """

    kept_tokens: float
    kept_sequences: float
    tokens: float
    sequences: float
    live: float
    penalised: float
    invalid: float


def counts_of(part: Part) -> Tensor:
    """``(7,)`` float64 on the device of the tokens, in the order of :class:`Counts`."""
    all_counts, zero = counts(part.batch, None), torch.zeros((), dtype=torch.float64, device=part.advantages.device)
    kept_counts = all_counts if part.terms.keep is None else counts(part.batch, part.terms.keep)
    active = [penalty for penalty in part.terms.penalties.values() if penalty.coefficient != 0]
    penalised = zero + sum(
        len(part.batch) if penalty.where is None else penalty.where.count_nonzero() for penalty in active
    )
    invalid = zero if part.terms.invalid_count is None else part.terms.invalid_count.double()
    return torch.cat(
        [kept_counts, all_counts, torch.stack([part.has_gradient.count_nonzero().double(), penalised, invalid])]
    )


def counted_parts(parts: Sequence[Part], batches: Sequence[TokenBatch], comm: Comm) -> tuple[list[Part], Counts]:
    """The parts of this rank with what their counts say, and the counts over all parts and ranks.

    Raises:
        OutOfRange: two parts share a sequence id.
    """
    # the live rows of a batch on a device are read together with the counts: one wait
    live_rows = [{} if part.advantages.device.type == "cpu" else part.live_rows() for part in parts]
    flat = torch.cat([*map(counts_of, parts), _repeated(batches)])
    flat, *columns = on_cpu([flat, *(tokens for rows in live_rows for tokens in rows.values())])
    by_part = flat[:-1].view(len(parts), len(Counts._fields))
    *total, repeated = comm.sum(torch.cat([by_part.sum(0), flat[-1:]])).tolist()
    if repeated:
        raise OutOfRange(
            f"{int(repeated)} sequences of this optimizer step have the id of one in another part, so that random "
            f"numbers would repeat. Give every response of all parts its own id: from_padded(sequence_ids=...)."
        )
    copies = iter(columns)
    result = [
        replace(counted(part, Counts(*row)), live_here={name: next(copies) for name in rows})
        for part, row, rows in zip(parts, by_part.tolist(), live_rows, strict=True)
    ]
    return result, Counts(*total)


def counted(part: Part, counts: Counts) -> Part:
    """The part with what its own counts say about its gradient."""
    return replace(part, trains=bool(counts.live), penalised=bool(counts.penalised))


def _repeated(parts: Sequence[TokenBatch]) -> Tensor:
    """``(1,)`` float64: the number of sequences with tokens that share their id with one in another part of this rank.

    Within a part a host may give equal responses the same id, a hash of their tokens, which no split changes.
    """
    if len(parts) < 2:
        return torch.zeros(1, dtype=torch.float64, device=parts[0].sequence_ids.device if parts else None)
    ids, order = torch.cat([part.sequence_ids for part in parts]).sort(stable=True)
    number = torch.cat([torch.full_like(part.sequence_ids, number) for number, part in enumerate(parts)])[order]
    filled = torch.cat([part.lengths for part in parts])[order] > 0
    return ((ids.diff() == 0) & (number.diff() != 0) & filled[1:] & filled[:-1]).count_nonzero().double().view(1)
