"""FIPO: the published golden values, and sums that stay inside their response and finite."""

from __future__ import annotations

import math

import pytest
import torch

from rlstab import FIPO, ClipHigher, PolicyOutputs, TokenBatch, compose, make_plan
from tests.core.steps import batch_of, live_of, token
from tests.zoo.pulls import pulls

DRIFTS = [0.1, -0.2, 0.3, 0.0]
GOLDEN = [1.2, 1.0981, 1.2, 1.0]


def factors(method: FIPO, drifts: list[list[float]], advantages: list[float]) -> list[list[float]]:
    """The pull of each token over its ratio and its advantage, without a clip."""
    ratios = torch.tensor(drifts, dtype=torch.float64).exp()
    A = torch.tensor(advantages, dtype=torch.float64)[:, None]
    return (pulls(method, ratios=ratios.tolist(), advantages=advantages) / ratios / A).tolist()


def test_golden_values() -> None:
    (found,) = factors(FIPO(), [DRIFTS], [1.0])
    assert found == pytest.approx(GOLDEN, abs=5e-5)
    (wide,) = factors(FIPO(low=0.0, high=9.0), [DRIFTS], [1.0])
    assert [math.log(one) for one in wide] == pytest.approx([0.1916, 0.0936, 0.3, 0.0], abs=5e-5)


def test_the_sum_runs_over_one_response_in_the_order_of_its_positions() -> None:
    """Two responses in one batch, with a hole in each and their tokens shuffled; the third token has no advantage."""
    signs = [1.0, 1.0, 0.0, 1.0]
    rows = [[token(drift=d, A=A * on) for d, on in zip(DRIFTS, signs, strict=True)] for A in (1.0, -2.0)]
    batch = batch_of(rows)
    policy, _ = live_of(batch, rows)
    order = torch.tensor([6, 1, 3, 0, 5, 2, 7, 4])
    shuffled = batch.select(order)
    plan = make_plan(compose(FIPO()), [shuffled])
    live = policy.select(order)
    leaf = live.logprobs.detach().requires_grad_()
    plan.loss(0, PolicyOutputs(leaf)).loss.backward()
    pulls_alone = [on * f * math.exp(d) / 8 for on, f, d in zip(signs, GOLDEN, DRIFTS, strict=True)]
    expected = [-A * pull for A in (1.0, -2.0) for pull in pulls_alone]
    assert leaf.grad[order.argsort()].tolist() == pytest.approx(expected, abs=2e-5)
    assert plan.live_rows(0)["logprobs"].all()  # the third is summed, though it does not pull


def test_what_is_far_off_policy_stays_out_of_the_sum_and_is_not_boosted_where_it_is_punished() -> None:
    drifts = [[0.05, math.log(5.0), math.log(11.0), 0.01]] * 2
    gamma = 2 ** (-1 / 32)
    method = FIPO(low=0.0, high=99.0)
    up, down = factors(method, drifts, [1.0, -1.0])
    assert up[2] == pytest.approx(math.exp(gamma * 0.01), rel=1e-12)  # its own ratio, 11, is left out
    assert up[0] == pytest.approx(math.exp(0.05 + gamma * math.log(5.0) + gamma**3 * 0.01), rel=1e-12)
    assert down == pytest.approx([up[0], 1.0, 1.0, up[3]], rel=1e-12)
    (every,) = factors(FIPO(low=0.0, high=99.0, max_ratio=None, safe_ratio=None), drifts[:1], [-1.0])
    assert every[2] == pytest.approx(11 * math.exp(gamma * 0.01), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("drift", [50.0, -50.0])
def test_a_long_response_that_ran_away_has_a_finite_factor(dtype: torch.dtype, drift: float) -> None:
    old = torch.full((1, 3000), -60.0, dtype=dtype)
    batch = TokenBatch.from_padded(response_mask=torch.ones(1, 3000), advantages=-torch.ones(1), old_logprobs=old)
    live = (old + drift).requires_grad_()
    method = FIPO(low=0.5, max_ratio=None, safe_ratio=None)
    out = make_plan(compose(method, ClipHigher()), [batch]).loss(0, PolicyOutputs.from_padded(batch, logprobs=live))
    assert out.loss.isfinite()
    assert out.metrics()["fipo/gate"] == pytest.approx(1.2 if drift > 0 else 0.5)
