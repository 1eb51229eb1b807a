"""Sign weights: the published methods on rewards of 0 and 1, and what a baseline makes of them."""

from __future__ import annotations

import pytest

from rlstab import SignWeights
from tests.zoo.pulls import pulls

REWARDS = [1, 0, 0, 1, 0]
W_REINFORCE, NSR, PSR = SignWeights(), SignWeights(positive=0.0), SignWeights(positive=1.0, negative=0.0)


@pytest.mark.parametrize(
    ("method", "advantage"),
    [
        (W_REINFORCE, lambda reward: 0.1 if reward else -1.0),
        (NSR, lambda reward: reward - 1.0),
        (PSR, float),
    ],
    ids=["w_reinforce", "nsr", "psr"],
)
def test_with_advantages_of_one_and_minus_one_each_is_the_published_one(method: SignWeights, advantage) -> None:
    """Their advantage of each response, with every response in the denominator."""
    ratios = [[1.0, 0.7, 2.0]] * len(REWARDS)
    found = pulls(method, ratios=ratios, advantages=[2.0 * reward - 1 for reward in REWARDS])
    expected = [[advantage(reward) * ratio for ratio in ratios[0]] for reward in REWARDS]
    for one, other in zip(found.tolist(), expected, strict=True):
        assert one == pytest.approx(other, rel=1e-14, abs=0)


@pytest.mark.parametrize("wrong", range(6))
def test_a_group_baseline_balances_both_signs_at_every_pass_rate(wrong: int) -> None:
    """Rewarded and punished mass: p and 1 - p without a baseline, p (1 - p) twice with one."""
    rewards = [0.0] * wrong + [1.0] * (5 - wrong)
    mean = sum(rewards) / 5

    def masses(advantages: list[float]) -> tuple[float, float]:
        found = pulls(SignWeights(positive=0.25), ratios=[[1.0]] * 5, advantages=advantages)
        return found.clamp(min=0).sum().item() / 5, -found.clamp(max=0).sum().item() / 5

    assert masses([2 * one - 1 for one in rewards]) == pytest.approx((0.25 * mean, 1 - mean), rel=1e-14)
    balanced = mean * (1 - mean)
    assert masses([one - mean for one in rewards]) == pytest.approx((0.25 * balanced, balanced), rel=1e-14, abs=1e-16)


def test_a_token_without_advantage_keeps_its_weight() -> None:
    """What another method adds to its advantage then pulls in full."""
    assert pulls(NSR, ratios=[[1.0, 1.0]], advantages=[[0.0, -2.0]]).tolist() == [[0.0, -2.0]]
