"""Evidence about responses that a host's batch holds: signals, identities of responses, and how a response ends."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from rlstab.adapters.host_correction import CORRECTION
from rlstab.console import capital
from rlstab.core.batch import SIGNALS
from rlstab.core.batch_checks import impossible
from rlstab.errors import MissingSignal
from rlstab.hosts import HOSTS

#: The signal of tokens for which the sampler gave no log-prob, 1.0 on those and 0.0 on others.
UNSCORED = "sampler_gave_none"


def signals_of(
    needs: Set[str],
    columns: Mapping[str, Tensor],
    names: Mapping[str, str],
    old: Tensor,
    computed: Mapping[str, Tensor],
    *,
    host: str,
) -> dict[str, Any]:
    """Arguments of :meth:`TokenBatch.from_padded`: the signals that an objective reads, and the old log-probs.

    Sampler log-probs that are NaN or above 0 are replaced by ``old``, and :data:`UNSCORED` says where.

    Args:
        needs: what the objective needs.
        columns: tensors of the host.
        names: the name of the column of each signal.
        old: ``(B, T)`` log-probs of the policy that the ratio divides by.
        computed: ``(B, T)`` signals that the adapter has computed, which take precedence.
        host: key of :data:`rlstab.hosts.HOSTS`.

    Raises:
        MissingSignal: a column is missing that was promised when the trainer was made.
    """
    signals = {"branch": torch.zeros_like(old)} if "branch" in needs else {}  # no host grows branches
    for name in sorted((needs & names.keys()) - computed.keys()):
        column = names[name]
        if columns.get(column) is None:
            message = f"the objective reads '{name}', and {HOSTS[host].name}'s batch has no '{column}'"
            raise MissingSignal(f"{message}. {capital(HOSTS[host].cure(name))}.")
        values = columns[column]
        signals[name] = values.expand(old.shape) if name == CORRECTION else values  # one weight for a response
    if "rollout_logprobs" in signals:
        sampled = signals["rollout_logprobs"]
        unscored = torch.isnan(sampled) | impossible("rollout_logprobs", sampled)
        signals["rollout_logprobs"] = torch.where(unscored, old.to(sampled.dtype), sampled)
        signals[UNSCORED] = unscored.float()
    signals |= {name: values for name, values in computed.items() if name in {"logprobs", "entropies", *needs}}
    shipped: dict[str, Any] = {name: signals.pop(name) for name in [*signals] if name in {*SIGNALS, "logprobs"}}
    return {"old_logprobs": old, **shipped, "extra": signals}


def ids_of_tokens(*sources: Any) -> set[int]:
    """Ids of tokens that end a response, from values of ``eos_token_id``: numbers, lists of them, or None."""
    listed = [source if isinstance(source, list) else [source] for source in sources]
    return {int(token) for tokens in listed for token in tokens if token is not None}


def hashes(values: Iterable[bytes], device: torch.device | str = "cpu") -> Tensor:
    """``(B,)`` int64: a hash of each value, by which a response or prompt has one id on any rank, cut and run."""
    digests = [hashlib.blake2b(value, digest_size=8).digest() for value in values]
    ids = [int.from_bytes(digest, "big", signed=True) for digest in digests]
    return torch.tensor(ids, dtype=torch.int64, device=device)


def distinct_hashes(values: Iterable[bytes], seen: Counter[bytes], device: torch.device | str = "cpu") -> Tensor:
    """The same, with another hash for each repetition of a value.

    Args:
        values: those of some of the responses of an optimizer step.
        seen: counts the values; begin an optimizer step with an empty one.
        device: the device of the result.
    """
    numbered = []
    for value in values:
        numbered.append(value + seen[value].to_bytes(4, "big") * bool(seen[value]))
        seen[value] += 1
    return hashes(numbered, device)
