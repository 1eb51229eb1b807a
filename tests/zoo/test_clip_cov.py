"""Clip-Cov: an exact number of tokens is hit, whatever the cut, each candidate as often as any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlstab import ClipCov, ClipHigher, RandomMask, compose, make_plan
from rlstab.errors import OutOfRange
from rlstab.testing.run import joined, run_parts, run_ranks, run_whole
from rlstab.testing.steps import Step, make_step
from tests.zoo.pulls import pulls

STEP = make_step("mixed", [17, 40, 8, 31, 25, 12, 36, 31], 2, 5, ())


def covariances(step: Step) -> Tensor:
    A, now = step.evidence["advantages"], step.evidence["logprobs"]
    return (A - A.mean()) * (now - now.mean())


@pytest.mark.parametrize("share", [1e-4, 0.005, 0.03, 0.1, 0.29])
@pytest.mark.parametrize("seed", range(3))
def test_as_many_tokens_are_hit_as_the_whole_step_says(share: float, seed: int) -> None:
    """One per 1 / share tokens of the step, in parts and over two ranks; parts alone would hit one each."""
    method = ClipCov(share=share, low=-0.5, high=9.0, seed=seed)
    count = max(1, int(share * 200))
    assert len(STEP) == 200
    candidates = covariances(STEP) > -0.5
    assert candidates.sum() > count
    plain = run_whole(compose(), STEP).gradients["logprobs"]
    expected = run_whole(method, STEP)
    hit = (expected.gradients["logprobs"] == 0) & (plain != 0)
    assert torch.equal(torch.where(hit, 0.0, plain), expected.gradients["logprobs"])
    assert not (hit & ~candidates).any()
    for found in (
        run_parts(method, STEP, [[0], [1, 3], [], [2, 6], [7, 4], [5]]),
        joined(run_ranks(method, STEP, [[[0, 5], [2]], [[7], [], [1, 6, 3], [4]]])),
        joined(run_ranks(method, STEP, [[list(range(8))], []])),
    ):
        assert float(found.report["hit"].total) == count
        assert float(found.report["hit"].count) == 200
        assert torch.equal(found.gradients["logprobs"] == 0, expected.gradients["logprobs"] == 0)


def test_each_candidate_is_hit_as_often_as_any_other() -> None:
    batch, times = STEP.batch(), torch.zeros(200)
    candidates = (covariances(STEP) > -0.5) & (covariances(STEP) < 9.0)
    for seed in range(600):
        plan = make_plan(ClipCov(share=0.05, low=-0.5, high=9.0, seed=seed), [batch])
        times += plan.terms(batch).weight == 0
    chance = 10 / float(candidates.sum())
    assert times.sum() == 6000
    assert not times[~candidates].any()
    # 600 draws each: five standard deviations of a binomial, and the sum of squares within five of chi squared
    spread = (600 * chance * (1 - chance)) ** 0.5
    scores = (times[candidates] - 600 * chance) / spread
    assert scores.abs().max() < 5
    assert abs(float(scores.square().mean()) - 1) < 5 * (2 / len(scores)) ** 0.5


def test_without_candidates_nothing_is_hit_and_with_few_all_are() -> None:
    values = covariances(STEP).sort().values
    low = float(values[-3] + values[-4]) / 2
    for bounds, expected in (((50.0, 60.0), 0), ((low, 60.0), 3)):
        plan = make_plan(ClipCov(share=0.5, low=bounds[0], high=bounds[1]), [batch := STEP.batch()])
        assert int((plan.terms(batch).weight == 0).sum()) == expected


def test_a_token_that_the_clip_has_stopped_is_no_candidate() -> None:
    """Of two rewarded and two punished tokens with a covariance, the ratio at the start of the step has left one."""
    now, old = [[-0.1, -0.1], [-2.5, -2.5]], [[-0.1, -0.9], [-2.5, -1.9]]
    given = {"ratios": [[1.0] * 2] * 2, "advantages": [1.0, -1.0], "old": old, "logprobs": now}
    assert pulls(ClipCov(share=1.0, low=0.5), **given).tolist() == [[0, 1], [0, 0]]  # ratio 2.2 is above 1 + 1
    narrow = ClipCov(share=1.0, low=0.5, clip_low=0.2, clip_high=2.0)
    assert pulls(narrow, **given).tolist() == [[0, 0], [0, -1]]  # ratio 0.55 is below 1 - 0.2


def test_the_numbers_drawn_are_not_those_of_a_random_mask() -> None:
    batch = STEP.batch()
    mask = RandomMask(share=0.5, sign="all")
    masked = ~make_plan(mask, [batch]).terms(batch).keep
    hit = make_plan(ClipCov(share=0.5, low=-99.0, high=99.0), [batch]).terms(batch).weight == 0
    assert 30 < int((masked & hit).sum()) < 70


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(OutOfRange, match=r"'clip_cov': low = 6\.0, high = 5\.0, expected low <= high\."):
        ClipCov(low=6.0)


def test_beside_the_published_clip_every_other_token_pulls_as_before() -> None:
    found = pulls(
        ClipCov(share=0.25, low=0.5),
        ClipHigher(low=1.0, high=1.0),
        ratios=[[1.9, 2.1], [0.01, 3.0]],
        advantages=[1.0, -1.0],
        old=[[-3.0, -3.0], [-0.1, -3.0]],
    )
    assert found.flatten().tolist() == pytest.approx([1.9, 0.0, -0.01, 0.0])
