"""The power mean: its known members, its gradient, its continuity at 0, and the schedule of its power."""

import math

import pytest
import torch

from rlstab import GSPO, HolderMean, SequenceMean, compose
from tests.core.steps import batch_of, live_of
from tests.zoo.coefficients import EXTREME, RATIOS, coefficients, extremes, row


def constant(power):
    return HolderMean(power=power, final_power=power)


@pytest.mark.parametrize("advantage", [2.0, -0.5])
@pytest.mark.parametrize("power", [-100.0, -2.0, -0.3, 0.0, 0.5, 1.0, 2.0, 100.0])
def test_the_gradient_is_that_of_the_power_mean(advantage, power):
    gaps = torch.tensor([math.log(one) for one in RATIOS], dtype=torch.float64, requires_grad=True)
    scaled = gaps.mean() if power == 0 else (torch.logsumexp(power * gaps, 0) - math.log(len(gaps))) / power
    (advantage * len(gaps) * scaled.exp()).backward()
    found = coefficients([constant(power), SequenceMean()], [row(RATIOS, advantage)])
    assert found == pytest.approx(gaps.grad.tolist(), rel=1e-11, abs=0)


def test_power_one_gives_each_token_its_own_ratio():
    found = coefficients([constant(1.0), SequenceMean()], [row(RATIOS, 2.0), row(RATIOS[::-1], -1.0)])
    expected = [2.0 * one for one in RATIOS] + [-one for one in RATIOS[::-1]]
    assert found == pytest.approx(expected, rel=1e-12)


def test_power_zero_is_gspo_and_all_powers_near_it_are_near_it():
    """Continuous to the last digits: the mean moves by p / 2 times a variance of 4, and by no rounding over p."""
    rows = [row(RATIOS, 1.0), row(RATIOS[::-1], -2.0)]
    geometric = coefficients([GSPO(), SequenceMean()], rows)
    assert coefficients([constant(0.0), SequenceMean()], rows) == geometric
    for power in (1e-3, 1e-6, 1e-9, 1e-12, 1e-15, 1e-200):
        for sign in (1.0, -1.0):
            found = coefficients([constant(sign * power), SequenceMean()], rows)
            assert found == pytest.approx(geometric, rel=10 * power + 1e-14)


@pytest.mark.parametrize("power", [-100.0, -2.0, 0.0, 2.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_tokens_are_finite(power, dtype):
    found = coefficients([constant(power), SequenceMean()], extremes(), dtype=dtype)
    assert all(math.isfinite(one) for one in found)
    if power == 0:
        mean = 1.5 * math.exp(sum(EXTREME) / 7)
        assert found == pytest.approx([mean] * 7 + [-mean] * 7, rel=1e-5)
    else:  # the mean is far beyond e^20 or below e^-20
        assert found == [0.0] * 14


def test_the_power_goes_from_the_first_to_the_last_and_stays():
    objective, powers = compose(HolderMean(power=2.0, final_power=-2.0, steps=4), SequenceMean()), []
    rows, state = [row([1.5, 0.5], 1.0)], objective.init_state()
    for number in range(7):
        part = [] if number == 1 else rows  # a step without tokens is a step
        batch = batch_of(part)
        out = objective(batch, live_of(batch, part)[0], state=state)
        state = out.state
        powers.append(out.metrics()["holder_mean/power"])
    assert powers == [2.0, 1.0, 0.0, -1.0, -2.0, -2.0, -2.0]
    assert state["holder_mean"] == {"step": 7}
