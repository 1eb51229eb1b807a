"""VESPO: its kernel at known points, and whose weight it is taken of."""

import math

import pytest
import torch

from rlstab import GSPO, VESPO, RandomMask, compose
from rlstab.errors import Conflict
from tests.core.says import says
from tests.core.steps import batch_of, live_of, token
from tests.zoo.coefficients import coefficients, extremes, row

#: A response of this weight, by ratios that have to be multiplied: no one of them is its weight or their mean.
SPREAD = (0.5, 3.0, 1.25, 0.8)


def response(weight, advantage, **more):
    return row([*SPREAD, weight / math.prod(SPREAD)], advantage, **more)


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize("weight", [1e-8, 0.01, 0.5, 1.0, 1.2, 3.0, 10.0])
def test_the_coefficient_is_the_kernel_of_the_weight_of_the_response(weight, advantage):
    k, lam = (2.0, 3.0) if advantage > 0 else (3.0, 2.0)
    expected = weight**k * math.exp(lam - lam * weight) * advantage
    assert coefficients([VESPO()], [response(weight, advantage)]) == pytest.approx([expected] * 5, rel=1e-12, abs=0)


def test_the_kernel_is_one_at_one_and_largest_at_power_over_decay():
    """1.208 for rewarded and 1.242 for punished responses: not bounded by 1."""
    for advantage, k, lam, top in ((1.0, 2.0, 3.0, 1.208), (-1.0, 3.0, 2.0, 1.242)):
        at = [coefficients([VESPO()], [response(k / lam + shift, advantage)])[0] for shift in (-1e-3, 0.0, 1e-3)]
        assert abs(at[1]) == pytest.approx(top, abs=5e-4)
        assert abs(at[1]) > max(abs(at[0]), abs(at[2]))
        assert coefficients([VESPO()], [response(1.0, advantage)])[0] == pytest.approx(advantage, rel=1e-12)


def test_the_anchor_says_whose_weight():
    rows = [response(1.3, 1.0, sampled=0.1), response(0.6, -1.0, sampled=-0.2)]
    weights = {"old": (1.3, 0.6), "rollout": (1.3 * math.exp(-0.5), 0.6 * math.exp(1.0))}
    for anchor, (up, down) in weights.items():
        expected = [up**2 * math.exp(3 - 3 * up)] * 5 + [-(down**3) * math.exp(2 - 2 * down)] * 5
        assert coefficients([VESPO(anchor=anchor)], rows) == pytest.approx(expected, rel=1e-12)


def test_where_the_live_policy_is_its_own_denominator_only_the_sampler_is_left():
    rows = [response(1.3, 1.0, sampled=0.1)]
    batch = batch_of(rows, live_ratio=True)
    pulls = []
    for anchor in ("old", "rollout"):
        policy, _ = live_of(batch, rows)
        pulls.append(compose(VESPO(anchor=anchor))(batch, policy).metrics()["ratio/surrogate"])
    weight = 1.3 * math.exp(-0.5)
    assert pulls == pytest.approx([1.0, weight**2 * math.exp(3 - 3 * weight)], rel=1e-12)


def test_dropped_tokens_belong_to_the_weight():
    mask = RandomMask(share=0.5, sign="all", seed=3)
    found = coefficients([VESPO(), mask], [response(1.3, 1.0)])
    assert 0 < found.count(0.0) < 5
    kept = 5 - found.count(0.0)
    expected = 1.3**2 * math.exp(3 - 3.9) * 5 / kept
    assert [one for one in found if one] == pytest.approx([expected] * kept, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_responses_far_away_pull_nothing_and_stay_finite(dtype, anchor):
    """Of log-weight 60, which is clamped to 20, and -60, clamped to -20."""
    far = [[token(now=-60.0, drift=sign * 30.0, A=advantage)] * 2 for sign in (1, -1) for advantage in (1.0, -1.0)]
    near = [[token(now=-60.0, drift=sign * 15.0, A=advantage)] * 4 for sign in (1, -1) for advantage in (1.0, -1.0)]
    found = coefficients([VESPO(anchor=anchor)], [*extremes(), *far, *near], dtype=dtype)
    assert all(math.isfinite(one) for one in found)
    assert found[14:22] == [0.0] * 8
    assert found[22:30] == [0.0] * 8
    assert found[30:] == pytest.approx([math.exp(3 - 40)] * 4 + [-math.exp(2 - 60)] * 4, rel=1e-4, abs=0)


def test_the_mismatch_is_counted_once_and_the_length_not_at_all():
    with says(
        Conflict,
        "'vespo' and 'gspo' exclude each other: the kernel takes the place of the ratio, and its weight is not "
        "normalised by the length.\n  Remove one of them.",
    ):
        compose(VESPO(), GSPO())
    assert "importance_correction" in VESPO.excludes
