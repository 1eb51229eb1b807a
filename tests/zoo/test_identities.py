import math

import pytest
import torch

from rlstab import (
    KLPenalty,
    LpReg,
    PolicyOutputs,
    compose,
    make_plan,
)
from rlstab.estimators import k1, k2, k3
from rlstab.testing.tolerances import REORDERED
from tests.core.steps import batch_of, live_of, random_rows, token
from tests.tolerances import assert_near

ROWS = random_rows(11, [3, 5, 0, 7, 4])


def run(*methods, rows=ROWS):
    """Loss and gradients of all live inputs."""
    batch = batch_of(rows)
    policy, leaves = live_of(batch, rows)
    objective = compose(*methods)
    loss = objective(batch, policy, state=objective.init_state()).loss
    loss.backward()
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves.values()]
    return [loss.detach(), *grads]


@pytest.mark.parametrize(("seed", "min_p"), [(0, 0.02), (1, 0.3)])
def test_lp_reg_pulls_logits_by_policy_minus_proxy(seed, min_p):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(6, 50, generator=generator, dtype=torch.float64)).requires_grad_()
    logprobs = logits.log_softmax(-1)
    with torch.no_grad():
        probs = logprobs.exp()
        kept = probs >= min_p * probs.amax(-1, keepdim=True)
        proxy = torch.where(kept, probs, 0.0) / torch.where(kept, probs, 0.0).sum(-1, keepdim=True)
        rare = torch.where(kept, probs, 2.0).argmin(-1, keepdim=True)  # the least likely token that the filter keeps
    mass = logprobs.masked_fill(~kept, -math.inf).logsumexp(-1)
    token_logprobs = logprobs.gather(-1, rare)

    batch = batch_of([[token()] for _ in range(6)])
    values = {"logprobs": token_logprobs.squeeze(-1), "max_logprobs": logprobs.amax(-1), "log_kept_mass": mass}
    evidence = {name: one.detach() for name, one in values.items()}
    batch = type(batch)(
        old_logprobs=evidence["logprobs"],
        **evidence,
        advantages=torch.tensor([-1.0, 1.0, -1.0, 0.0, -1.0, -1.0], dtype=torch.float64),
        **{name: getattr(batch, name) for name in ("sequence", "position", "sequence_ids", "group_ids")},
    )
    plan = make_plan(compose(LpReg(share=1.0, min_p=min_p, coefficient=2.0)), [batch])
    policy = PolicyOutputs(values["logprobs"].detach().requires_grad_(), log_kept_mass=mass)
    out = plan.loss(batch, policy)
    out.loss.backward()

    punished = batch.advantages < 0
    assert torch.equal(plan.live_rows(batch)["log_kept_mass"], punished)
    expected = torch.where(punished[:, None], 2.0 / 6 * (probs - proxy), 0.0)
    assert_near(logits.grad, expected, 50 + 8, size=24.0)  # 50 tokens in the vocabulary, logits below 12 apart
    divergence = torch.where(kept, proxy * (proxy.log() - probs.log()), 0.0).sum(-1)
    assert out.report["lp_reg/value"].value == pytest.approx(divergence[punished].mean().item(), rel=REORDERED)


@pytest.mark.parametrize(("estimator", "value", "slope"), [(k1, 0.6931, 1.0), (k2, 0.2402, 0.6931), (k3, 0.1931, 0.5)])
def test_estimators_at_a_known_point(estimator, value, slope):
    logprob = torch.tensor(math.log(0.2), dtype=torch.float64, requires_grad=True)
    found = estimator(math.log(0.1) - logprob)
    found.backward()
    assert found.item() == pytest.approx(value, abs=5e-5)
    assert logprob.grad.item() == pytest.approx(slope, abs=5e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_straight_through"])
def test_kl_penalty_is_its_estimator(estimator):
    """The straight-through form has the value of k3 and the gradient of k2."""
    value = {"k1": 0.6931, "k2": 0.2402}.get(estimator, 0.1931)
    slope = {"k1": 1.0, "k3": 0.5}.get(estimator, 0.6931)
    rows = [[token(now=math.log(0.2), ref=math.log(0.1), A=0.0)]]
    loss, gradient, *_ = run(KLPenalty(coefficient=1.0, estimator=estimator), rows=rows)
    assert loss.item() == pytest.approx(value, abs=5e-5)
    assert gradient[0, 0].item() == pytest.approx(slope, abs=5e-5)


def test_k3_is_finite_and_flat_beyond_its_cap():
    d = torch.tensor([100.0, -100.0, 2.6, 2.7, -11.0], dtype=torch.float64, requires_grad=True)
    values = k3(d, cap=10.0)
    values.sum().backward()
    assert values.tolist() == pytest.approx([10.0, 10.0, math.exp(2.6) - 3.6, 10.0, 10.0])
    assert d.grad.tolist() == pytest.approx([0.0, 0.0, math.exp(2.6) - 1, 0.0, 0.0])
    assert torch.isfinite(k3(torch.tensor([1e4, -1e4]))).all()
