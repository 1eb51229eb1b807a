"""Small pure mathematics: estimators of a Kullback-Leibler divergence from the log-prob of one sampled token.

``d = ln p_target(a) - ln p_policy(a)`` in nats, shape ``(n,)``, for tokens ``a`` sampled from the policy. Names after
J. Schulman, "Approximating KL divergence" (2020).
"""

from __future__ import annotations

from torch import Tensor

#: ``d`` is clamped to this before ``exp``: at 100 nats the exponential overflows and 0 * inf poisons the gradient.
MAX_D = 20.0


def k1(d: Tensor) -> Tensor:
    """``-d``: unbiased for KL(policy || target); as a loss its expected on-policy gradient is zero."""
    return -d


def k2(d: Tensor) -> Tensor:
    """``d^2 / 2``: biased in value; its on-policy gradient is that of KL(policy || target)."""
    return d.square() / 2


def k3(d: Tensor, cap: float | None = None) -> Tensor:
    """``e^d - d - 1 >= 0``: unbiased in value; its on-policy gradient is that of KL(target || policy).

    Args:
        d: log-prob of the target minus that of the policy.
        cap: largest value, with zero gradient above it; None has none.
    """
    d = d.clamp(-MAX_D, MAX_D)
    value = d.exp() - d - 1
    return value if cap is None else value.clamp(max=cap)
