"""Random numbers by identity: the same token draws the same number in any batch, order, rank or process."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """The two's complement int64 that has the bits of ``value``."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic and drags the sign in)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def uniform(seed: int, *identity: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), a pure function of the seed and the identity.

    Args:
        seed: any integer.
        identity: int64 tensors that broadcast against each other, for example sequence ids and positions.

    Returns:
        float64 tensor of the broadcast shape, with 53 random bits.
    """
    golden = _signed(0x9E3779B97F4A7C15)
    state = torch.zeros((), dtype=torch.int64, device=identity[0].device) + _signed(seed)
    for part in identity:
        state = _mix(state + golden) + part.to(torch.int64)
    return _shift(_mix(state + golden), 11).to(torch.float64) * 2.0**-53
