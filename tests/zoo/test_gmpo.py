"""GMPO: its coefficients are the gradient of the published surrogate, which knows no token form."""

import math

import pytest
import torch

from rlstab import GMPO, GSPO, SAPO, SequenceMean
from tests.core.steps import token
from tests.zoo.coefficients import RATIOS, coefficients, extremes, row


def published(gaps, advantage, low, high):
    """``-A rho`` with rho of the clipped log-ratios, as a function of them."""
    sign = 1.0 if advantage > 0 else -1.0
    clipped = sign * torch.minimum(sign * gaps, sign * gaps.clamp(-low, high))
    return -advantage * clipped.mean().exp()


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 0.2), (3.0, 0.0)])
def test_the_gradient_is_that_of_the_published_surrogate(advantage, low, high):
    gaps = torch.tensor([math.log(one) for one in RATIOS if one != 1], dtype=torch.float64, requires_grad=True)
    published(gaps, advantage, low, high).backward()
    found = coefficients([GMPO(low, high), SequenceMean()], [row(gaps.detach().exp().tolist(), advantage)])
    assert found == pytest.approx((-len(gaps) * gaps.grad).tolist(), rel=1e-12, abs=0)
    assert 0 < found.count(0.0) < len(found)


def test_without_a_range_it_is_gspo():
    rows = [row(RATIOS, 1.0), row(RATIOS[::-1], -2.0)]
    wide = coefficients([GMPO(1e3, 1e3), SequenceMean()], rows)
    assert wide == coefficients([GSPO(), SequenceMean()], rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_tokens_are_finite(dtype):
    """Rewarded: the mean of -50, -20, -0.1, 0, 0.1, and twice 0.4, which are clipped."""
    found = coefficients([GMPO(), SequenceMean()], extremes(), dtype=dtype)
    up, down = (1.5 * math.exp(one / 7) for one in (-69.2, 69.2))
    assert found == pytest.approx([up] * 5 + [0.0] * 2 + [0.0] * 2 + [-down] * 5, rel=1e-5)


def test_a_token_is_clipped_on_the_side_of_its_own_advantage():
    """A response whose tokens differ in sign, as after a bonus."""
    drifts = [0.5, 0.5, -0.5, -0.5]
    tokens = [token(drift=drift, A=sign) for drift, sign in zip(drifts, [1.0, -1.0, 1.0, -1.0], strict=True)]
    rho = math.exp((0.4 + 0.5 - 0.5 - 0.4) / 4)
    assert coefficients([GMPO(), SequenceMean()], [tokens]) == pytest.approx([0.0, -rho, rho, 0.0], rel=1e-12)


def test_a_gate_is_given_the_ratio_of_the_response():
    found = coefficients([GMPO(), SAPO(), SequenceMean()], [row([1.2, 1.3], 1.0)])
    rho = math.sqrt(1.2 * 1.3)
    assert found == pytest.approx([rho / math.cosh((rho - 1) / 2) ** 2] * 2, rel=1e-12)
