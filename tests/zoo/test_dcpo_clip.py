"""The clip of DCPO: where each token is stopped depends on how rare it was."""

from __future__ import annotations

import math

import pytest
import torch

from rlstab import DCPOClip, compose, make_plan
from tests.core.steps import batch_of, token
from tests.zoo.coefficients import coefficients


def bounds(method: DCPOClip, *probabilities: float, dtype: torch.dtype = torch.float64) -> list[tuple[float, float]]:
    """Smallest and largest ratio of tokens of these old probabilities, in nats below 0 where they are that."""
    now = [math.log(one) if one > 0 else one for one in probabilities]
    batch = batch_of([[token(now=one) for one in now]], dtype=dtype)
    found = make_plan(compose(method), [batch]).terms(batch).bounds
    assert found is not None
    assert found.low.dtype == found.high.dtype == dtype
    return list(zip((1 - found.low).tolist(), (1 + found.high).tolist(), strict=True))


def test_the_bounds_of_the_paper() -> None:
    """Its table: at q = 0.9 down to 0.69 and up to 1.06, at q = 0.01 down to 0.005 and up to 0.05."""
    likely, some, rare = bounds(DCPOClip(), 0.9, 0.2, 0.01)
    assert likely == pytest.approx((0.769, 1.187), abs=5e-4)
    assert some == pytest.approx((0.5, 1.618), abs=5e-4)
    assert rare == pytest.approx((0.5, 5.0), abs=0.005)
    assert [0.9 * one for one in likely] == pytest.approx([0.69, 1.06], abs=0.01)


def test_a_bound_solves_its_equation() -> None:
    for q in (0.999, 0.8, 0.65):
        ((low, high),) = bounds(DCPOClip(), q)
        assert (1 - low) * low * q == pytest.approx(0.16, rel=1e-12)
        assert (high - 1) * high * q == pytest.approx(0.2, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", [DCPOClip(), DCPOClip(low=0.0, high=0.0), DCPOClip(low=1e300, high=1e300)], ids=repr)
def test_any_probability_has_finite_bounds(method: DCPOClip, dtype: torch.dtype) -> None:
    for low, high in bounds(method, -1e-7, -50.0, -100.0, -800.0, -1e30, dtype=dtype):
        assert 0.5 <= low <= 1 <= high <= method.cap


@pytest.mark.parametrize(
    ("q", "ratio", "A", "pulls"),
    [
        (0.9, 1.18, 1.0, True),
        (0.9, 1.19, 1.0, False),
        (0.9, 0.77, -1.0, True),
        (0.9, 0.76, -1.0, False),
        (0.01, 4.9, 1.0, True),
        (0.01, 5.1, 1.0, False),
        (1e-6, 9.9, 1.0, True),
        (1e-6, 10.1, 1.0, False),
        (1e-6, 0.51, -1.0, True),
        (1e-6, 0.49, -1.0, False),
        (1e-6, 9.9, -1.0, True),
        (1e-6, 10.1, -1.0, False),
    ],
)
def test_the_ratio_pulls_inside(q: float, ratio: float, A: float, pulls: bool) -> None:
    rows = [[token(now=math.log(q), drift=math.log(ratio), A=A)]]
    assert coefficients(DCPOClip(), rows) == pytest.approx([A * ratio if pulls else 0.0])


def test_without_a_dual_clip_a_punished_token_has_no_upper_bound() -> None:
    rows = [[token(drift=math.log(11.0), A=-1.0)]]
    assert coefficients(DCPOClip(dual_clip=None), rows) == pytest.approx([-11.0])
