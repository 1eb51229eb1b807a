"""Identities of responses and prompts that depend only on their tokens, not on the rank, the cut or the run."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor


def hashes(values: Iterable[bytes], device: torch.device | str = "cpu") -> Tensor:
    """``(B,)`` int64: a hash of each value."""
    digests = [hashlib.blake2b(value, digest_size=8).digest() for value in values]
    ids = [int.from_bytes(digest, "big", signed=True) for digest in digests]
    return torch.tensor(ids, dtype=torch.int64, device=device)


def distinct_hashes(values: Iterable[bytes], seen: Counter[bytes], device: torch.device | str = "cpu") -> Tensor:
    """The same, with another hash for each repetition of a value.

    Args:
        values: of some of the responses of an optimizer step.
        seen: counts the values; begin an optimizer step with an empty one.
        device: of the result.
    """
    numbered = []
    for value in values:
        numbered.append(value + seen[value].to_bytes(4, "big") * bool(seen[value]))
        seen[value] += 1
    return hashes(numbered, device)
