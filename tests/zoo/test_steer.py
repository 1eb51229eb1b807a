"""STEER: the estimate of the change of entropy, and weights between its extremes in the whole step."""

from __future__ import annotations

import math

import pytest
import torch

from rlstab import STEER, ClipHigher
from tests.zoo.pulls import pulls


def entropy(logits: torch.Tensor) -> torch.Tensor:
    return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("form", ["exponential", "linear"])
def test_the_estimate_is_the_change_through_the_own_logit_over_the_probability(form: str) -> None:
    """dH/dz = -p (ln p + H) of the token's logit z, which the step moves by A r (1 - p)."""
    logits = 2 * torch.randn(6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slopes = torch.autograd.functional.jacobian(lambda z: entropy(z).sum(), logits)[:, 0]
    lp, A = logits.log_softmax(-1)[:, 0], torch.tensor([1.0, -2.0, 0.5, -0.1, 1.5, 3.0], dtype=torch.float64)
    old = lp - 0.3 * torch.arange(-2, 4)
    ratios = (lp - old).exp()
    omega = (A * ratios * (1 - lp.exp()) * slopes / lp.exp()).abs()
    if form == "exponential":
        expected = 0.8 ** (omega / omega.max())
    else:
        expected = 1.2 - 0.4 * (omega - omega.min()) / (omega.max() - omega.min())
    given = {"old": old[:, None], "logprobs": lp[:, None], "entropies": entropy(logits)[:, None]}
    found = pulls(STEER(form=form), ratios=[[1.1]] * 6, advantages=A.tolist(), **given)
    torch.testing.assert_close(found[:, 0], 1.1 * A * expected, rtol=1e-12, atol=0)


def test_a_calm_step_is_left_alone_in_the_exponential_form() -> None:
    """With a largest change of 0.0001 the weights are near 1, not down to 0.8."""
    lp = math.log(0.5)
    found = pulls(STEER(), ratios=[[1.0, 1.0]], advantages=[1.0], old=lp, entropies=[[-lp + 2e-4, -lp]])
    assert found[0].tolist() == pytest.approx([0.8**0.005, 1.0], rel=1e-9)


@pytest.mark.parametrize(("form", "others"), [("exponential", 1.0), ("linear", 1.2)])
def test_one_token_far_off_policy_takes_the_whole_range_and_nothing_overflows(form: str, others: float) -> None:
    evidence = {"old": [[-50.0, -1.0, -1.0]], "logprobs": [[-0.5, -1.0, -1.0]], "entropies": 2.0}
    found = pulls(STEER(form=form), ClipHigher(), ratios=[[1.0, 1.0, 1.0]], advantages=[1.0], **evidence)
    assert found[0].tolist() == pytest.approx([0.8, others, others], rel=1e-6)
