"""Signals in a host's batch that need no forward of the policy, by the host's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
from torch import Tensor

from rlstab.console import capital
from rlstab.core.batch import TokenBatch, impossible
from rlstab.core.stats import Mean
from rlstab.errors import MissingSignal
from rlstab.hosts import HOSTS


def held_signals(
    needs: Set[str], columns: Mapping[str, Tensor], names: Mapping[str, str], old: Tensor, *, host: str
) -> tuple[dict[str, Tensor], Tensor]:
    """The ``(B, T)`` signals, and ``(B, T)`` bool: sampler log-probs that are NaN or above 0, replaced by ``old``.

    Args:
        needs: of the objective.
        columns: tensors of the host.
        names: of the columns, by signal.
        old: ``(B, T)`` log-probs of the policy that the ratio divides by.
        host: key of :data:`rlstab.hosts.HOSTS`.

    Raises:
        MissingSignal: a column is missing that was promised when the trainer was made.
    """
    signals = {}
    for name in sorted(needs & names.keys()):
        column = names[name]
        if columns.get(column) is None:
            what = f"the objective reads '{name}', and {HOSTS[host].name}'s batch has no '{column}'"
            raise MissingSignal(f"{what}. {capital(HOSTS[host].cure(name))}.")
        signals[name] = columns[column]
    lost = torch.zeros_like(old, dtype=torch.bool)
    if "rollout_logprobs" in signals:
        sampled = signals["rollout_logprobs"]
        lost = torch.isnan(sampled) | impossible("rollout_logprobs", sampled)
        signals["rollout_logprobs"] = torch.where(lost, old.to(sampled.dtype), sampled)
    if "branch" in needs:
        signals["branch"] = torch.zeros_like(old)  # no host grows branches, but a user-defined function may
    return signals, lost


def unscored(needs: Set[str], batches: Sequence[tuple[TokenBatch, Tensor]]) -> dict[str, Mean]:
    """The share of tokens for which the sampler gave no log-prob; empty if the objective does not read them.

    Args:
        needs: of the objective.
        batches: the evidence of each micro-batch, and its number of such tokens.
    """
    if "rollout_logprobs" not in needs:
        return {}
    lost = torch.stack([count.double() for _, count in batches]).sum()
    tokens = torch.tensor(float(sum(len(batch) for batch, _ in batches)), dtype=torch.float64)
    return {"sampler/unscored": Mean(lost, tokens)}
