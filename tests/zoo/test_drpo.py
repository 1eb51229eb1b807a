"""DRPO: the gradient of its surrogate, at known points and against autograd."""

from __future__ import annotations

import math

import pytest
import torch

from rlstab import DRPO
from tests.core.steps import token
from tests.zoo.coefficients import coefficients


def moved(q: float, p: float, A: float, old: float | None = None) -> list[list[dict[str, float]]]:
    """One token that the sampler drew with probability q, that the old policy gives ``old``, and that has p now."""
    now = math.log(q if old is None else old)
    return [[token(now=now, drift=math.log(p) - now, sampled=math.log(q) - now, A=A)]]


@pytest.mark.parametrize(
    ("q", "p", "A", "delta", "expected"),
    [
        (0.5, 0.5, 1.0, 0.15, 1.0),
        (0.5, 0.65, 1.0, 0.15, 0.0),  # the edge, where DPPO begins to stop
        (0.5, 0.8, 1.0, 0.15, -1.6),  # r = 1.6, gate 1 - 2
        (0.05, 0.5, 1.0, 0.15, -20.0),  # r = 10, gate 1 - 3
        (0.5, 0.35, -2.0, 0.15, 0.0),
        (0.5, 0.2, -2.0, 0.15, 0.8),  # r = 0.4, gate 1 - 2
        (0.5, 0.65, -2.0, 0.15, -5.2),  # against the evidence: r = 1.3, gate 1 + 1
        (0.001, 0.01, 1.0, 0.15, 9.4),  # r = 10 of a rare token, gate 1 - 0.06
        (0.5, 1.0, 1.0, 12.5, 1.92),  # the default: half of all mass moved, and r = 2 keeps 0.96
    ],
)
def test_known_coefficients(q: float, p: float, A: float, delta: float, expected: float) -> None:
    assert coefficients(DRPO(delta=delta), moved(q, p, A)) == pytest.approx([expected], rel=1e-13, abs=1e-14)


@pytest.mark.parametrize("A", [1.5, -0.5])
@pytest.mark.parametrize("delta", [0.15, 12.5])
def test_the_gradient_of_the_surrogate(A: float, delta: float) -> None:
    for q in (0.9, 0.3, 0.001):
        for p in (0.95, 0.4, 0.002):
            live = torch.tensor(p, dtype=torch.float64).log().requires_grad_()
            ratio = live.exp() / q
            (-A * ratio + abs(A) * q * (ratio - 1) ** 2 / (2 * delta)).backward()
            assert live.grad is not None
            assert coefficients(DRPO(delta, anchor="old"), moved(q, p, A)) == pytest.approx([-live.grad.item()])


def test_at_the_default_no_token_is_stopped() -> None:
    """The gate is within 0.92 and 1.08 whatever a token did."""
    for q, p in ((1e-9, 1.0), (1.0, 1e-9)):
        for A in (1.0, -1.0):
            (found,) = coefficients(DRPO(), moved(q, p, A, old=p))  # ratio 1, all the mass moved
            assert found / A == pytest.approx(1 - A * (p - q) / 12.5)
            assert 0.92 <= found / A <= 1.08


def test_the_ratio_is_that_of_the_loss_and_the_move_is_from_the_anchor() -> None:
    rows = moved(0.5, 0.6, 1.0, old=0.3)
    assert coefficients(DRPO(0.2), rows) == pytest.approx([2.0 * 0.5])
    assert coefficients(DRPO(0.2), rows, live_ratio=True) == pytest.approx([0.5])
    assert coefficients(DRPO(0.2, anchor="old"), rows) == pytest.approx([2.0 * -0.5])
    assert coefficients(DRPO(0.2, anchor="old"), rows, live_ratio=True) == [1.0]


@pytest.mark.parametrize("anchor", ["rollout", "old"])
def test_ratios_of_fifty_nats_are_finite(anchor: str) -> None:
    far = [[token(now=-60.0, drift=drift, A=A) for drift in (50.0, -50.0)] for A in (1.0, -1.0)]
    assert all(math.isfinite(one) for one in coefficients(DRPO(0.001, anchor=anchor), far))  # type: ignore[arg-type]


def test_against_the_sampler_it_acts_in_every_run() -> None:
    assert DRPO().reads_drift == frozenset()
    assert DRPO(anchor="old").reads_drift == {"live"}
