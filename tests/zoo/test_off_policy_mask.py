"""A response is stopped as a whole, by its mean gap in nats per token, and only where it is punished."""

from __future__ import annotations

import math

import pytest
import torch

from rlstab import ClipHigher, OffPolicyMask, TokenObjective, compose, make_plan
from tests.core.methods import Scale
from tests.core.steps import batch_of, gradients, live_of, token


def slopes(rows: list[list[dict[str, float]]], *methods: TokenObjective, live_ratio: bool = False) -> list[float]:
    """``-n dL/dlogp``: the coefficient ``c_t`` of each token."""
    batch = batch_of(rows, live_ratio=live_ratio)
    policy, leaves = live_of(batch, rows)
    compose(*methods)(batch, policy).loss.backward()
    return [-one * len(batch) for one in gradients(batch, leaves)["logp"].tolist()]


def moved(A: float, *drifts: float) -> list[dict[str, float]]:
    return [token(now=-2.0, drift=one, A=A) for one in drifts]


def test_coefficients_are_those_of_the_ratio_or_0() -> None:
    """Mean gaps 0.6, 0.4 and 0.6 of punished responses, of a rewarded one, and one that became likelier."""
    rows = [moved(-1, -1.5, 0.3), moved(-2, -0.4), moved(-1, -0.6, -0.6, -0.6), moved(1, -3.0), moved(-1, 2.0)]
    expected = [0, 0, -2 * math.exp(-0.4), 0, 0, 0, math.exp(-3.0), -math.exp(2.0)]
    assert slopes(rows, OffPolicyMask()) == pytest.approx(expected)


def test_a_gap_on_the_threshold_pulls() -> None:
    rows = [moved(-1, -0.5, -0.5), moved(-1, -0.5, -0.75)]
    assert slopes(rows, OffPolicyMask()) == pytest.approx([-math.exp(-0.5)] * 2 + [0, 0])


def test_the_anchor_is_the_sampler_or_the_old_policy() -> None:
    stale = [{**one, "rollout": one["old"] + 0.7} for one in moved(-1, -0.1, -0.2)]
    assert slopes([stale], OffPolicyMask()) == [0, 0]
    assert slopes([stale], OffPolicyMask(anchor="old")) == pytest.approx([-math.exp(-0.1), -math.exp(-0.2)])
    left = moved(-1, -3.0)
    assert slopes([left], OffPolicyMask(anchor="old")) == [0]
    assert slopes([left], OffPolicyMask(anchor="old"), live_ratio=True) == [-1]  # it divides by itself: no gap
    assert slopes([left], OffPolicyMask(), live_ratio=True) == [0]


def test_the_sign_is_that_of_the_advantage_with_bonuses_and_the_mean_is_over_tokens_that_others_stop() -> None:
    rows = [moved(0.5, -2.0, 0.0)]
    assert slopes(rows, OffPolicyMask()) == pytest.approx([0.5 * math.exp(-2.0), 0.5])
    assert slopes(rows, OffPolicyMask(), Scale(bonus=-1.0)) == [0, 0]
    assert slopes([moved(-1, -2.0, 0.0)], OffPolicyMask(), ClipHigher()) == [0, 0]


def test_log_ratios_of_any_size_are_finite() -> None:
    rows = [moved(A, shift, 0.0) for A in (1.0, -1.0) for shift in (50.0, -50.0, 1000.0, -1000.0)]
    batch = batch_of(rows, dtype=torch.float32)
    policy, leaves = live_of(batch, rows, dtype=torch.float32)
    make_plan(compose(OffPolicyMask()), [batch]).loss(batch, policy).loss.backward()
    found = gradients(batch, leaves)["logp"]
    assert found.isfinite().all()
    assert found.view(8, 2).any(1).tolist() == [True] * 4 + [True, False, True, False]
