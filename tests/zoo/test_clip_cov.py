"""Clip-Cov: an exact number of tokens is hit, whatever the cut, each candidate as often as any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlstab import ClipCov, RandomMask, compose, make_plan
from rlstab.testing.run import joined, run_parts, run_ranks, run_whole
from rlstab.testing.steps import Step, make_step

STEP = make_step("mixed", [17, 40, 8, 31, 25, 12, 36, 31], 2, 5, ())


def covariances(step: Step) -> Tensor:
    A, now = step.evidence["advantages"], step.evidence["logprobs"]
    return (A - A.mean()) * (now - now.mean())


@pytest.mark.parametrize(("share", "seed"), [(1e-4, 0), (0.03, 1), (0.29, 2)])
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


def test_the_numbers_drawn_are_not_those_of_a_random_mask() -> None:
    batch = STEP.batch()
    mask = RandomMask(share=0.5, sign="all")
    masked = ~make_plan(mask, [batch]).terms(batch).keep
    hit = make_plan(ClipCov(share=0.5, low=-99.0, high=99.0), [batch]).terms(batch).weight == 0
    assert 30 < int((masked & hit).sum()) < 70
