"""Responses without tokens, which TRL counts in a mean over responses and a plan does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm
from rlstab.core.plan import Plan


def with_empty_responses(plan: Plan, batches: Sequence[TokenBatch], comm: Comm) -> Plan:
    """A plan whose means over responses count those without tokens, as TRL does; every rank calls it.

    ``mask_truncated_completions`` makes such responses: the mean over tokens leaves them out, that over responses does
    not.
    """
    count = torch.tensor(float(sum(batch.num_sequences for batch in batches)), dtype=torch.float64)
    empty = float(comm.sum(count)) - plan.everything.sequences
    kept_totals, totals_of_all = (
        replace(totals, sequences=totals.sequences + empty) for totals in (plan.kept, plan.everything)
    )
    return replace(plan, kept=kept_totals, everything=totals_of_all)
