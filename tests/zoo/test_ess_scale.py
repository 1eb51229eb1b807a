"""The learning rate follows the effective sample size of the whole optimizer step, and is left alone where watched."""

from __future__ import annotations

import math

import pytest

from rlstab import ESSScale, compose, observe
from rlstab.testing.tolerances import REORDERED
from tests.core.steps import batch_of, gradients, live_of, run_parts, token


def rows(*weights: list[float]) -> list[list[dict[str, float]]]:
    """Responses by the ratios of their tokens, of the policy at the start of the step over the sampler."""
    return [[token(now=-9.0, sampled=-math.log(one)) for one in response] for response in weights]


@pytest.mark.parametrize(
    ("method", "weights", "scale"),
    [
        (ESSScale(), [[3.0], [3.0], [3.0]], 1.0),
        (ESSScale(), [[2.0, 4.0], [1.0]], (81 / (2 * 65)) ** 0.5),
        (ESSScale(power=1.0), [[2.0, 4.0], [1.0]], 81 / (2 * 65)),
        (ESSScale(base=0.8), [[2.0, 4.0], [1.0]], (81 / (2 * 65) / 0.8) ** 0.5),
        (ESSScale(base=0.6), [[2.0, 4.0], [1.0]], 1.0),
        (ESSScale(), [[1e9]] + [[1.0]] * 15, 16**-0.5),  # one response carries everything
        (ESSScale(), [[1e9] * 40, [1e9] * 40, [1.0]], (2 / 3) ** 0.5),  # e^829
        (ESSScale(), [[], [], [5.0]], 1.0),
        (ESSScale(), [[], []], 1.0),
    ],
)
def test_scales_by_hand(method: ESSScale, weights: list[list[float]], scale: float) -> None:
    for parts in ([list(range(len(weights)))], [[0], list(range(1, len(weights)))], [list(range(len(weights))), []]):
        plan, _ = run_parts(compose(method), rows(*weights), parts)
        assert plan.lr_scale == pytest.approx(scale, rel=1e-7)


def test_the_scale_is_that_of_all_parts_and_reported_once() -> None:
    given = rows([2.0, 4.0], [1.0], [0.3])
    whole, report = run_parts(compose(ESSScale()), given, [[0, 1, 2]])
    for parts in ([[2], [0], [1]], [[], [1, 0], [2]]):
        cut, other = run_parts(compose(ESSScale()), given, parts)
        assert cut.lr_scale == pytest.approx(whole.lr_scale, rel=REORDERED)
        for name in ("ess_scale/ess", "ess_scale/lr_scale"):
            assert other[name].value == pytest.approx(report[name].value, rel=REORDERED)
    assert report["ess_scale/lr_scale"].value == whole.lr_scale < 1


def test_the_loss_and_its_gradient_are_left_alone() -> None:
    given = rows([2.0, 4.0], [1.0])
    batch, slopes = batch_of(given), []
    for objective in (compose(ESSScale()), compose()):
        policy, leaves = live_of(batch, given)
        objective(batch, policy, state=objective.init_state()).loss.backward()
        slopes.append(gradients(batch, leaves)["logp"].tolist())
    assert slopes[0] == slopes[1]


def test_what_is_only_observed_is_reported_and_scales_nothing() -> None:
    given = rows([2.0, 4.0], [1.0])
    _, acting = run_parts(compose(ESSScale()), given, [[0], [1]])
    plan, watched = run_parts(compose(observe(ESSScale())), given, [[0], [1]])
    assert plan.lr_scale == 1.0
    assert watched["observe_ess_scale/ess"].value == acting["ess_scale/ess"].value
    assert watched["observe_ess_scale/would_scale_lr"].value == acting["ess_scale/lr_scale"].value < 1
