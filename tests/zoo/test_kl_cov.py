"""KL-Cov: the published factor on each gradient, on exactly the tokens of the largest covariance in the step."""

from __future__ import annotations

import numpy as np
import pytest

from rlstab import KLCov, compose
from tests.core.steps import random_rows, run_parts
from tests.zoo.pulls import pulls

#: Covariances 1.425, -2.175, -1.425 and 0.675: the first of four is the largest.
OLD, ADVANTAGES = [[-0.1, -2.5], [-0.1, -1.5]], [1.0, -2.0]


@pytest.mark.parametrize(("ratio", "sign"), [(1e-8, -1), (0.5, -1), (1.0, 0), (1.3, 1), (1e8, 1)])
def test_a_selected_token_pulls_with_the_ratio_less_a_sign_and_nothing_is_clipped(ratio: float, sign: int) -> None:
    found = pulls(KLCov(share=0.25, coefficient=0.7), ratios=[[ratio] * 2] * 2, advantages=ADVANTAGES, old=OLD)
    expected = [ratio - 0.7 * sign, ratio, -2 * ratio, -2 * ratio]
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.26])
def test_the_share_is_rounded_down_over_the_whole_step_and_is_one_token_at_least(share: float) -> None:
    rows = random_rows(3, [6, 9, 4, 8])
    tokens = [one for row in rows for one in row]
    A, now = (np.array([one[field] for one in tokens]) for field in ("A", "now"))
    largest = np.sort((A - A.mean()) * (now - now.mean()))[::-1]
    count = max(1, int(share * 27))
    for parts in ([[0, 1, 2, 3]], [[0], [1, 3], [], [2]]):
        plan, report = run_parts(compose(KLCov(share=share)), rows, parts)
        assert plan.penalised == count
        assert report["kl_cov/threshold"].value == pytest.approx(largest[count - 1], rel=1e-13)
