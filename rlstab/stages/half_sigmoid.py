"""Fitting ``f(x) = sigmoid(w . x) / 2`` to numbers in [0, 1/2] by least squares, in deterministic steps.

Damped Gauss-Newton from w = 0 with a ridge. What is fitted lies in the span of the examples, so a step solves as many
equations as there are examples or features, whichever are fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Most steps, and most halvings of a step.
STEPS, HALVINGS = 50, 20
#: The fit ends when a step lowers the loss by less than this share.
ENOUGH = 1e-10
#: A feature that varies by less than this share of the variation of all is constant up to rounding.
CONSTANT = 1e-6


@dataclass(frozen=True, eq=False)
class HalfSigmoid:
    """A fitted f. Make one with :meth:`fit`.

    Attributes:
        mean, scale: ``(d,)`` float64, by which features are centred and multiplied.
        weights: ``(d + 1,)`` float64, w of the scaled features and of a constant 1.
    """

    mean: Tensor
    scale: Tensor
    weights: Tensor

    @classmethod
    def fit(cls, features: Tensor, targets: Tensor, ridge: float) -> HalfSigmoid:
        """Minimise ``sum (f(x_i) - y_i)^2 + ridge |w|^2`` over scaled features: mean 0, mean square norm 1.

        Args:
            features: ``(n, d)`` float64, n > 0.
            targets: ``(n,)`` float64 in [0, 1/2].
            ridge: above 0.
        """
        mean = features.mean(0)
        deviation = (features - mean).square().mean(0).sqrt()
        varies = deviation > CONSTANT * deviation.norm()
        scale = torch.where(varies, 1 / torch.where(varies, deviation, 1.0), 0.0) / max(1, int(varies.sum())) ** 0.5
        examples = _scaled(features, mean, scale)
        span = torch.linalg.qr(examples.T).Q
        return cls(mean, scale, span @ _minimum(examples @ span, targets, ridge))

    def __call__(self, features: Tensor) -> Tensor:
        """``(m,)`` values of f for ``(m, d)`` features."""
        return torch.sigmoid(_scaled(features, self.mean, self.scale) @ self.weights) / 2


def _scaled(features: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return torch.nn.functional.pad((features - mean) * scale, (0, 1), value=1.0)


def _minimum(examples: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """``(k,)`` weights of ``(n, k)`` examples; each step is the weighted ridge regression of a linearised f."""

    def loss(weights: Tensor) -> float:
        return float((torch.sigmoid(examples @ weights) / 2 - targets).square().sum() + ridge * weights @ weights)

    weights = torch.zeros(examples.shape[1], dtype=torch.float64)
    best, penalty = loss(weights), ridge * torch.eye(len(weights), dtype=torch.float64)
    for _ in range(STEPS):
        value = torch.sigmoid(examples @ weights) / 2
        slopes = (value * (1 - 2 * value)).unsqueeze(1) * examples
        step = torch.linalg.solve(slopes.T @ slopes + penalty, slopes.T @ (targets - value) - ridge * weights)
        lower = (weights + step / 2**halving for halving in range(HALVINGS))
        better = next((candidate for candidate in lower if loss(candidate) < best), None)
        if better is None:
            break
        weights, before, best = better, best, loss(better)
        if before - best < ENOUGH * before:
            break
    return weights
