"""Identities that the papers prove, on random softmaxes, through the signals and the loss of the library."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlstab import (
    ClipHigher,
    KLPenalty,
    LpReg,
    PolicyOutputs,
    TokenBatch,
    TokenObjective,
    compose,
)
from rlstab.signals import token_signals_from_logits
from tests.tolerances import assert_near, rounding

#: Bound on the logits of `softmaxes`.
LOGIT = 100.0
GRID = [
    (ratio, advantage)
    for ratio in (0.01, 0.3, 0.79, 0.81, 0.99, 1.0, 1.01, 1.19, 1.27, 1.29, 2.9, 3.1, 9.0, 11.0)
    for advantage in (2.0, -2.0)
]


def softmaxes(count: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits from nearly uniform to nearly certain, and a token drawn from each half the time, any token otherwise."""
    rng = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 1.3, count, dtype=torch.float64).unsqueeze(-1)
    logits = scale * torch.randn(count, vocabulary, generator=rng, dtype=torch.float64)
    drawn = torch.multinomial(logits.softmax(-1), 1, generator=rng).squeeze(-1)
    anything = torch.randint(vocabulary, (count,), generator=rng)
    return logits, torch.where(torch.arange(count) % 2 == 0, drawn, anything)


@pytest.mark.parametrize("vocabulary", [2, 5, 50])
def test_the_gradient_norm_of_a_token_is_exact_and_within_both_bounds(vocabulary: int) -> None:
    """arXiv 2602.15620, Theorem 3.1, for the weight w of an unclipped token."""
    logits, tokens = softmaxes(400, vocabulary)
    logits.requires_grad_()
    signals = token_signals_from_logits(logits, tokens, needs={"logprobs", "entropies", "sum_p_sq"})
    (gradient,) = torch.autograd.grad(signals.logprobs.sum(), logits)
    norm = gradient.square().sum(-1)
    p, entropy = signals.logprobs.detach().exp(), signals.entropies.detach()
    assert_near(norm, 1 - 2 * p + signals.sum_p_sq.detach(), vocabulary + 8, size=LOGIT)
    close = rounding(torch.float64, LOGIT, vocabulary + 8)
    constant = (vocabulary - 1) / (vocabulary * math.log(vocabulary) ** 2)
    assert bool((norm >= 1 - 2 * p + (-entropy).exp() - close).all())
    assert bool((norm <= 2 - 2 * p - constant * entropy.square() + close).all())


def leverage(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """``Phi`` of a token and ``S2`` of its position, arXiv 2606.19236 section 2."""
    logp = logits.log_softmax(-1)
    p, entropy = logp.exp(), -(logp.exp() * logp).sum(-1)
    s2 = (p.square() * (logp + entropy.unsqueeze(-1))).sum(-1)
    chosen = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen.exp() * (chosen + entropy) - s2, s2


def test_entropy_moves_by_minus_advantage_times_phi() -> None:
    """dH/deta = -A Phi along one gradient step on ``A ln p(a)``, by central differences."""
    logits, tokens = softmaxes(200, 12)
    advantages = torch.where(torch.arange(200) % 3 == 0, -1.3, 0.7).double()
    signals = token_signals_from_logits(leaf := logits.clone().requires_grad_(), tokens, needs={"logprobs"})
    (direction,) = torch.autograd.grad((advantages * signals.logprobs).sum(), leaf)

    def entropy(eta: float) -> Tensor:
        return token_signals_from_logits(logits + eta * direction, tokens, needs={"entropies"}).entropies

    # of h = 1e-5: truncation of h^2 / 6 = 2e-11 third derivatives, rounding of u / h = 1e-11 entropies
    slope = (entropy(1e-5) - entropy(-1e-5)) / 2e-5
    torch.testing.assert_close(slope, -advantages * leverage(logits, tokens)[0], atol=1e-8, rtol=1e-6)


def test_s2_is_not_negative_and_phi_averages_to_nothing() -> None:
    logits, _ = softmaxes(300, 9)
    everything = torch.arange(9).expand(300, 9)
    phi = torch.stack([leverage(logits, everything[:, token])[0] for token in range(9)], dim=-1)
    s2 = leverage(logits, everything[:, 0])[1]
    close = rounding(torch.float64, LOGIT, 9 + 8)
    assert bool((s2 >= -close).all())
    assert_near((logits.softmax(-1) * phi).sum(-1), torch.zeros(300).double(), 9 + 8, size=LOGIT)
    surprisal = -logits.log_softmax(-1)
    entropy = (surprisal * (-surprisal).exp()).sum(-1, keepdim=True)
    assert bool((phi[surprisal >= entropy] <= close).all()), "a token rarer than average raises entropy when rewarded"


def test_the_kept_mass_is_the_forward_kl_of_the_filtered_policy() -> None:
    """KL(proxy || policy) = -ln Z on-policy, in value and in its logit gradient, policy - proxy."""
    logits, tokens = softmaxes(200, 20)
    leaf = logits.clone().requires_grad_()
    signals = token_signals_from_logits(leaf, tokens, needs={"log_kept_mass"}, min_p=0.1)
    (gradient,) = torch.autograd.grad(-signals.log_kept_mass.sum(), leaf)
    p = logits.softmax(-1)
    kept = p >= 0.1 * p.amax(-1, keepdim=True)
    proxy = torch.where(kept, p, 0) / torch.where(kept, p, 0).sum(-1, keepdim=True)
    divergence = torch.special.xlogy(proxy, proxy / p).sum(-1)
    assert_near(-signals.log_kept_mass.detach(), divergence, 20 + 8, size=LOGIT)
    assert_near(gradient, p - proxy, 20 + 8, size=LOGIT)


def coefficient(objective: TokenObjective, ratio: float, advantage: float, **signals: float) -> float:
    """``c`` in gradient = -c grad ln p, for one token."""
    column = {name: torch.tensor([[value]]).double() for name, value in signals.items()}
    old = torch.tensor([[-3.0]]).double()
    batch = TokenBatch.from_padded(
        response_mask=torch.ones(1, 1), advantages=torch.tensor([advantage]).double(), old_logprobs=old, **column
    )
    live = (old + math.log(ratio)).requires_grad_()
    compose(objective)(batch, PolicyOutputs.from_padded(batch, logprobs=live, log_kept_mass=old)).loss.backward()
    assert live.grad is not None
    return -float(live.grad)


class TestCoefficients:
    """The closed forms of the gradient, on a grid of ratios and both signs of the advantage."""

    def test_without_a_clip(self) -> None:
        for ratio, advantage in GRID:
            assert coefficient(compose(), ratio, advantage) == pytest.approx(ratio * advantage)

    @pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28)])
    def test_clip(self, low: float, high: float) -> None:
        for ratio, advantage in GRID:
            clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
            expected = 0.0 if clipped else ratio * advantage
            assert coefficient(ClipHigher(low, high), ratio, advantage) == pytest.approx(expected), (ratio, advantage)

    @pytest.mark.parametrize("dual", [3.0, 10.0])
    def test_dual_clip(self, dual: float) -> None:
        for ratio, advantage in GRID:
            clipped = ratio > 1.28 if advantage > 0 else ratio < 0.8 or ratio > dual
            expected = 0.0 if clipped else ratio * advantage
            found = coefficient(ClipHigher(0.2, 0.28, dual), ratio, advantage)
            assert found == pytest.approx(expected), (ratio, advantage)

    def test_ratio_cap_of_lp_reg(self) -> None:
        """``clip(r, 0, 10) A``: nothing above the cap, for either sign."""
        # the token is not plausible, so the penalty stays away
        method = LpReg(ratio_cap=10.0)
        for ratio, advantage in GRID:
            found = coefficient(method, ratio, advantage, max_logprobs=3.0)
            assert found == pytest.approx(0.0 if ratio > 10 else ratio * advantage), (ratio, advantage)

    @pytest.mark.parametrize(
        ("estimator", "slope"),
        [
            ("k1", lambda d: 1.0),
            ("k2", lambda d: -d),
            ("k3", lambda d: 1 - math.exp(d)),
            ("k3_straight_through", lambda d: -d),
        ],
    )
    def test_kl(self, estimator: str, slope: Callable[[float], float]) -> None:
        """The penalty adds its slope in ln p, with d = ln p_ref - ln p."""
        method = KLPenalty(coefficient=0.1, estimator=estimator)  # type: ignore[arg-type]
        for ratio, advantage in GRID:
            d = -2.5 - (-3.0 + math.log(ratio))
            capped = estimator == "k3" and math.exp(d) - d - 1 > 10
            expected = ratio * advantage - 0.1 * (0.0 if capped else slope(d))
            found = coefficient(method, ratio, advantage, ref_logprobs=-2.5)
            assert found == pytest.approx(expected), (ratio, advantage)
