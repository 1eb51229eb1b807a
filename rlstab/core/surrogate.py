"""The ratio of a token to the policy that sampled it, and the clipped surrogate of ratio and advantage."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlstab.core.batch import TokenBatch
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.terms import Bounds

#: Log-ratios are clamped to this many nats before ``exp``; beyond it the gradient is zero.
MAX_LOG_RATIO = 20.0


def token_log_ratio(policy: PolicyOutputs, anchor: PolicyOutputs, batch: TokenBatch) -> Tensor:
    """``(n,)`` default of the ratio slot: one ratio per token."""
    return policy.logprobs - (anchor.logprobs if batch.live_ratio else batch.old_logprobs)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, bounds: Bounds | None, unclipped: Tensor | None) -> Tensor:
    """``(n,)`` loss to minimise: the clipped ratio times the advantage, negated.

    ``max(-A r, -A clip(r, 1 - low, 1 + high))`` (arXiv 1707.06347 eq. 7), for A < 0 at most ``-A dual``
    (arXiv 1912.09729 eq. 7), written as one clamp per sign. Without bounds it is ``-A r``.
    """
    if bounds is None:
        return -advantages * ratio
    constant = ratio.detach()
    rising = torch.clamp(constant, max=1 + bounds.high)
    falling = torch.clamp(constant, min=1 - bounds.low)
    if bounds.dual is not None:
        falling = torch.clamp(falling, max=bounds.dual)
    bounded = torch.where(advantages < 0, falling, rising)
    if unclipped is not None:
        bounded = torch.where(unclipped, constant, bounded)
    push = -advantages
    value = push * bounded
    return with_slope(ratio, value, bounded.eq_(constant).mul_(push))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``(n,)`` exponential of a log-ratio that is clamped; the gradient beyond the clamp is zero."""
    free = log_ratio.detach()
    bounded = free.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = bounded.exp()
    return with_slope(log_ratio, ratio, bounded.eq_(free).mul_(ratio))


def with_slope(x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """``value`` as a function of ``x``, both ``(n,)`` and elementwise, with the derivative ``slope``.

    ``value`` and ``slope`` are computed from ``x.detach()``. A second derivative raises.
    """
    return _Sloped.apply(x, value, slope)  # type: ignore[no-untyped-call, no-any-return]  # torch's apply has no types


class _Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return gradient * slope, None, None
