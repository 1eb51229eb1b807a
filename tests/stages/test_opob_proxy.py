"""The stand-in for the gradient norm, against autograd through a softmax."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlstab.stages.opob import OPOB
from rlstab.stages.opob_proxy import OPOBProxy, logit_squares
from tests.stages.estimating import WIDTH, advantages, drawn


def test_it_is_the_squared_gradient_by_the_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    chosen = torch.randint(7, (3, 5))
    logprobs = logits.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    mask = torch.arange(5) < torch.tensor([[5], [3], [1]])
    (gradient,) = torch.autograd.grad(logprobs[mask].sum(), logits)
    sum_p_sq = logits.detach().softmax(-1).square().sum(-1)
    found = torch.where(mask, logit_squares(logprobs.detach(), sum_p_sq), 0.0)
    torch.testing.assert_close(found, gradient.square().sum(-1))


def test_a_sure_token_has_none() -> None:
    sure = torch.tensor([0.0, -1e-8, 0.0])
    assert logit_squares(sure, torch.tensor([1.0, 1 - 2e-8, 1 - 1e-7])).tolist() == pytest.approx([0.0] * 3, abs=1e-7)
    assert bool((logit_squares(sure, torch.tensor([1.0, 1 - 2e-8, 1 - 1e-7])) >= 0).all())


def test_what_stands_after_the_end_does_not_matter() -> None:
    whole = drawn(1, graded=True)
    after = torch.arange(WIDTH) >= whole.lengths.unsqueeze(-1)
    junk = {
        name: torch.where(after, 7.0, one) if one.dtype == torch.float64 and one.shape == after.shape else one
        for name, one in whole.extra.items()
    }
    junk["rollout_logprobs"] = torch.where(after, -3.0, whole.extra["rollout_logprobs"])
    for stage in (OPOB(), OPOBProxy()):
        assert torch.equal(advantages(stage, replace(whole, extra=junk))[0], advantages(stage, whole)[0])


@pytest.mark.parametrize("norm_by_std", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_with_its_norms_it_is_opob(seed: int, norm_by_std: bool) -> None:
    whole = drawn(seed, graded=True)
    pairs = zip(whole.extra["logprobs"].tolist(), whole.extra["sum_p_sq"].tolist(), strict=True)
    squares = [sum(1 - 2 * math.exp(one) + two for one, two in zip(*row, strict=True) if two) for row in pairs]
    given = replace(whole, extra={**whole.extra, "squared_gradient": torch.tensor(squares, dtype=torch.float64)})
    found, expected = (advantages(one(norm_by_std=norm_by_std), given)[0] for one in (OPOBProxy, OPOB))
    torch.testing.assert_close(found, expected)
