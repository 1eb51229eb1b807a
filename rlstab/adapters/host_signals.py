"""Signals that a host's batch holds beside those of a forward, by the host's names."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from rlstab.core.batch import impossible
from rlstab.errors import MissingSignal


def held_signals(
    needs: Set[str], columns: Mapping[str, Tensor], names: Mapping[str, tuple[str, str]], old: Tensor, *, host: str
) -> tuple[dict[str, Tensor], Tensor]:
    """The ``(B, T)`` signals, and ``(B, T)`` bool: sampler log-probs that are NaN or above 0, which ``old`` replaces.

    Args:
        needs: of the objective.
        columns: what the host holds.
        names: the column of a signal, and what makes the host hold it.
        old: ``(B, T)`` log-probs of the policy that the ratio divides by.
        host: in the error.

    Raises:
        MissingSignal: a column is not there that was promised when the trainer was made.
    """
    signals = {}
    for name in sorted(needs & names.keys()):
        column, how = names[name]
        if columns.get(column) is None:
            raise MissingSignal(f"the objective reads '{name}', and {host}'s batch has no '{column}'. {how}")
        signals[name] = columns[column]
    lost = torch.zeros_like(old, dtype=torch.bool)
    if "rollout_logprobs" in signals:
        sampled = signals["rollout_logprobs"]
        lost = torch.isnan(sampled) | impossible("rollout_logprobs", sampled)
        signals["rollout_logprobs"] = torch.where(lost, old.to(sampled.dtype), sampled)
    if "branch" in needs:
        signals["branch"] = torch.zeros_like(old)  # hosts grow no branches; a user-defined signal may know of some
    return signals, lost
