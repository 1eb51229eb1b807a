"""GSPO: a response has one ratio, made of what is kept, and its clip is a matter of 1e-4."""

import math

import pytest
import torch

from rlstab import GSPO, ClipHigher, RandomMask, SequenceMean, compose, make_plan
from tests.core.steps import batch_of, token
from tests.zoo.coefficients import coefficients, row

PUBLISHED = [GSPO(), ClipHigher(low=3e-4, high=4e-4), SequenceMean()]


def response(log_ratio, advantage, length=8):
    """Ratios that go up and down around a geometric mean."""
    return [token(now=-1.0, drift=log_ratio + 0.4 * (-1) ** place, A=advantage) for place in range(length)]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("log_ratio", [-4e-4, -2e-4, 0.0, 3e-4, 5e-4])
def test_the_coefficient_is_the_mean_ratio_unless_the_response_is_clipped(log_ratio, advantage):
    s = math.exp(log_ratio)
    clipped = s > 1 + 4e-4 if advantage > 0 else s < 1 - 3e-4
    expected = [0.0 if clipped else s * advantage] * 8
    assert coefficients(PUBLISHED, [response(log_ratio, advantage)]) == pytest.approx(expected, rel=1e-12)


def test_a_token_clip_stops_no_response():
    rows = [response(log_ratio, advantage) for log_ratio in (-0.1, 0.1) for advantage in (1.0, -1.0)]
    found = coefficients([GSPO(), ClipHigher(), SequenceMean()], rows)
    assert found == coefficients([GSPO(), SequenceMean()], rows)
    alone = coefficients([ClipHigher(), SequenceMean()], rows)
    assert alone.count(0.0) == 16  # four of the eight tokens of each response


def test_the_range_survives_float32():
    """The mean of log-ratios is known more finely than any log-prob: bounds that are a quarter of a step off it."""
    step = 2.0**-18  # of float32 between 32 and 64
    rows = [[token(now=-40.0, drift=(100 + place % 2) * step, A=1.0) for place in range(64)]]
    for bound, stopped in ((100.25 * step, True), (100.75 * step, False)):
        clip = ClipHigher(high=math.expm1(bound))
        found = coefficients([GSPO(), clip, SequenceMean()], rows, dtype=torch.float32)
        assert [one == 0 for one in found] == [stopped] * 64


def test_the_mean_is_over_what_is_kept():
    rows = [row([0.5, 1.5, 2.0, 0.9, 1.2, 0.7], 1.0), row([1.1, 0.6, 1.4, 1.3, 0.8, 0.9], -1.0)]
    mask = RandomMask(share=0.5, sign="all", seed=3)
    batch = batch_of(rows)
    keep = make_plan(compose(mask), [batch]).terms(batch).keep.view(2, 6).tolist()
    assert all(0 < sum(one) < 6 for one in keep)
    found = coefficients([GSPO(), SequenceMean(), mask], rows)
    for number, (tokens, kept) in enumerate(zip(rows, keep, strict=True)):
        gaps = [one["logp"] - one["old"] for one, there in zip(tokens, kept, strict=True) if there]
        s = math.exp(sum(gaps) / len(gaps)) * tokens[0]["A"] * 12 / (2 * len(gaps))
        expected = [s if there else 0.0 for there in kept]
        assert found[6 * number : 6 * number + 6] == pytest.approx(expected, rel=1e-12)
