"""OPOB: the baseline against sums by hand, and that no other constant makes the gradient vary less."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from rlstab.core.stats import Settled
from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.grpo import GRPO
from rlstab.stages.opo import OPO
from rlstab.stages.opob import OPOB
from rlstab.stages.optimal_baseline import optimal_baseline
from rlstab.testing.tolerances import REORDERED
from tests.stages.estimating import advantages, batch, by_group, drawn


@pytest.mark.parametrize("norm_by_std", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_every_advantage_by_hand(seed: int, norm_by_std: bool) -> None:
    whole = drawn(seed, graded=True)
    now, then = whole.extra["logprobs"].tolist(), whole.extra["rollout_logprobs"].tolist()
    squares = whole.extra["squared_gradient"].tolist()
    (found,) = advantages(OPOB(norm_by_std=norm_by_std), whole)
    for places in by_group(whole):
        rewards = [float(whole.rewards[one]) for one in places]
        weights = [math.exp(sum(now[one]) - sum(then[one])) ** 2 * squares[one] for one in places]
        baseline = sum(w * r for w, r in zip(weights, rewards, strict=True)) / sum(weights)
        spread = statistics.pstdev(rewards)
        scale = spread if norm_by_std and spread > 1e-8 else 1.0
        assert found[places].tolist() == pytest.approx([(one - baseline) / scale for one in rewards], abs=1e-12)


def evidence(squares: list[float], drift: list[float]) -> dict[str, object]:
    return {
        "logprobs": [[-1.0 + one, 0.0] for one in drift],
        "rollout_logprobs": [[-1.0, 0.0]] * len(drift),
        "squared_gradient": squares,
    }


def test_of_equal_weights_it_is_the_group_mean() -> None:
    given = batch([1.0, 0.0, 0.5, 1.0], extra=evidence([2.0] * 4, [0.3] * 4))
    plain, divided = (advantages(OPOB(norm_by_std=one), given)[0].tolist() for one in (False, True))
    assert plain == pytest.approx(advantages(DrGRPO(), given)[0].tolist(), abs=REORDERED)
    assert divided == pytest.approx(advantages(GRPO(ddof=0, epsilon=1e-12), given)[0].tolist(), abs=1e-10)


def test_of_norms_that_are_lengths_it_is_opo() -> None:
    given = batch([1.0, 0.0, 0.5], lengths=[1.0, 2.0, 5.0], extra=evidence([1.0, 2.0, 5.0], [0.0] * 3))
    found, expected = (advantages(one, given)[0].tolist() for one in (OPOB(norm_by_std=False), OPO()))
    assert found == pytest.approx(expected, abs=REORDERED)


def test_without_any_gradient_the_mean_is_plain() -> None:
    given = batch([1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1], extra=evidence([0.0, 0.0, 0.0, 3.0], [0.0] * 4))
    assert advantages(OPOB(norm_by_std=False), given)[0].tolist() == [0.5, -0.5, -1.0, 0.0]


def test_no_constant_makes_the_second_moment_of_the_gradient_smaller() -> None:
    """Of orthogonal gradients, the square of a group's gradient is the sum of (w_i n_i (R_i - b))^2."""
    given = drawn(2, graded=True)
    places = max(by_group(given), key=len)
    group = given.select(torch.tensor(places))
    ratios = group.extra["logprobs"].sum(-1) - group.extra["rollout_logprobs"].sum(-1)
    weights = ratios.exp().square() * group.extra["squared_gradient"]

    def moment(baseline: float) -> float:
        return float((weights * (group.rewards - baseline).square()).sum())

    best = float(optimal_baseline(group, weights.log())[0])
    assert all(moment(best) < moment(best + step) for step in (-0.3, -0.01, 0.01, 0.3))


def test_it_reports_the_shift_and_how_many_responses_count() -> None:
    given = batch([1.0, 0.0, 1.0], [0, 0, 1], extra=evidence([3.0, 1.0, 1.0], [0.0] * 3))
    found = OPOB().report(given, Settled(), {})
    assert found["baseline_shift"].value == pytest.approx(0.25)  # 3 / 4 less 1 / 2
    assert found["effective_share"].value == pytest.approx(16 / (2 * 10))  # (3 + 1)^2 / (2 (9 + 1))
    assert float(found["effective_share"].count) == 2  # the lone response is not counted
