"""Random numbers by identity: the same token draws the same number in any batch, order, rank or process."""

import torch
from torch import Tensor

from rlstab.core.compare import chunks


def _signed(value: int) -> int:
    """The two's complement int64 that has the bits of ``value``."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


#: The step of splitmix64's counter.
GOLDEN = _signed(0x9E3779B97F4A7C15)


def _fold(x: Tensor, bits: int) -> Tensor:
    """``x ^= x >> bits`` in place; the mask makes torch's arithmetic shift a logical one."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix(x: Tensor) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), in place: every input bit reaches every output bit."""
    return _finish(x.add_(GOLDEN))


def _finish(x: Tensor) -> Tensor:
    x = _fold(x, 30).mul_(_signed(0xBF58476D1CE4E5B9))
    x = _fold(x, 27).mul_(_signed(0x94D049BB133111EB))
    return _fold(x, 31)


def _integers(identity: Tensor) -> Tensor:
    """The numbers that are mixed; :func:`rlstab.testing.relabel.same_draws` replaces ids here."""
    return identity.to(torch.int64)


def uniform(seed: int, *identity: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), a pure function of the seed and the identity.

    Args:
        seed: any integer.
        identity: int64 tensors that broadcast against each other, for example sequence ids and positions.

    Returns:
        float64 tensor of the broadcast shape, with 53 random bits.
    """
    state = torch.zeros((), dtype=torch.int64, device=identity[0].device) + _signed(seed)
    for part in identity:
        state = _mix(state) + _integers(part)
    return _number(_mix(state))


def uniform_in(seed: int, group: Tensor, member: Tensor, position: Tensor) -> Tensor:
    """``uniform(seed, group[member], position)`` for ``(S,)`` groups and ``(n,)`` members, mixed once a group."""
    state = torch.zeros((), dtype=torch.int64, device=group.device) + _signed(seed)
    state = _mix(_mix(state) + _integers(group)).add_(GOLDEN)
    numbers = torch.empty(member.shape, dtype=torch.float64, device=member.device)
    for out, index, offset in chunks(numbers, member, position):
        out.copy_(_number(_finish(state.index_select(0, index).add_(offset))))
    return numbers


def _number(bits: Tensor) -> Tensor:
    return bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).to(torch.float64).mul_(2.0**-53)
