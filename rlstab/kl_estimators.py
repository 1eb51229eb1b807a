"""Functions of the log-prob of one sampled token: its probability, and estimators of a KL divergence.

``d = ln p_target(a) - ln p_policy(a)`` in nats, shape ``(n,)``, for tokens ``a`` sampled from the policy. Names after
J. Schulman, "Approximating KL divergence" (2020).
"""

import torch
from torch import Tensor

from rlstab.core.surrogate import with_slope

#: ``d`` is clamped to this before ``exp``: at 100 nats the exponential overflows and 0 * inf poisons the gradient.
MAX_D = 20.0


def probability(logprobs: Tensor) -> Tensor:
    """``(n,)`` float64 in [0, 1]: a log-prob above 0, where rounding may put it, counts as 0."""
    return logprobs.double().clamp(max=0.0).exp()


def k1(d: Tensor) -> Tensor:
    """``-d``: unbiased for KL(policy || target); as a loss its expected on-policy gradient is zero."""
    return -d


def k2(d: Tensor) -> Tensor:
    """``d^2 / 2``: biased in value; its on-policy gradient is that of KL(policy || target)."""
    return d.square() / 2


def k3(d: Tensor, cap: float | None = None) -> Tensor:
    """``e^d - d - 1 >= 0``: unbiased in value; its on-policy gradient is that of KL(target || policy).

    Args:
        d: log-prob of the target minus that of the policy. A second derivative raises.
        cap: largest value, with zero gradient above it; None has none.
    """
    free = d.detach()
    bounded = free.clamp(-MAX_D, MAX_D)
    slope = bounded.exp().sub_(1)  # a by-product of the value; autograd through two clamps costs more
    value = slope - bounded
    slope *= bounded.eq_(free)
    if cap is not None:
        slope *= torch.le(value, cap, out=bounded)
        value.clamp_(max=cap)
    return with_slope(d, value, slope)
