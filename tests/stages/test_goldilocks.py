"""Goldilocks by counting: the posterior of each prompt, and the prompts that it takes."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.stages import pass_rates
from rlstab.stages.goldilocks import Goldilocks
from tests.stages.selections import fill, offer, responses


def evidence(rollouts, pool, discount):
    """What is known of each prompt after rollouts of ``(prompt, group, reward, given)`` rows: ``[right, wrong]``."""
    found = [[0.0, 0.0] for _ in range(pool)]
    for rows in rollouts:
        for prompt in {row[0] for row in rows if row[3] == 0}:
            found[prompt] = [one * discount for one in found[prompt]]
        for prompt, _, reward, given in rows:
            if given == 0:
                solved = min(max(reward, 0.0), 1.0)
                found[prompt][0] += solved
                found[prompt][1] += 1 - solved
    return found


def expected_spread(right, wrong, cells=20_000):
    """E[sqrt(p (1 - p))] under Beta(1 + right, 1 + wrong), by the midpoint rule in x with p = sin(x)^2.

    The substitution makes the integrand smooth at both ends.
    """
    above = below = 0.0
    for cell in range(cells):
        x = (cell + 0.5) * math.pi / 2 / cells
        p = math.sin(x) ** 2
        density = p**right * (1 - p) ** wrong * math.sin(x) * math.cos(x)
        above += density * math.sqrt(p * (1 - p))
        below += density
    return above / below


def rollouts_of(pool, number, seed):
    dice = random.Random(seed)
    return [
        [(dice.randrange(pool), group, dice.choice([0, 1, 0.25, 2.0, -1.0]), dice.choice([0, 0, 3]))
         for group in range(5) for _ in range(4)]
        for _ in range(number)
    ]  # fmt: skip


def state_after(stage, rollouts):
    state = stage.init_state()
    for rows in rollouts:
        state = measure_all(stage, [responses(rows)], state, LocalComm())[1]
    return state


@pytest.mark.parametrize("discount", [0.0, 0.7, 1.0])
def test_the_state_equals_the_oracle(discount):
    rollouts = rollouts_of(7, 5, seed=1)
    state = state_after(Goldilocks(pool=7, discount=discount), rollouts)
    expected = torch.tensor(evidence(rollouts, 7, discount), dtype=torch.float64)
    torch.testing.assert_close(torch.stack([state["right"], state["wrong"]], 1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("right", "wrong"), [(0, 0), (4, 0), (0, 8), (4, 4), (0.3, 2.6), (57.5, 20.25), (400, 3)])
def test_the_expected_spread_is_the_integral(right, wrong):
    state = {"right": torch.tensor([right], dtype=torch.float64), "wrong": torch.tensor([wrong], dtype=torch.float64)}
    assert float(pass_rates.expected_spread(state)) == pytest.approx(expected_spread(right, wrong), rel=1e-7)
    assert float(pass_rates.expected_rate(state)) == pytest.approx((1 + right) / (2 + right + wrong), rel=1e-14)


@pytest.mark.parametrize("random_share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("first", "count"), [(0, 5), (5, 4), (9, 14)])
def test_the_selection_equals_the_oracle(random_share, first, count):
    rollouts = rollouts_of(11, 3, seed=2)
    stage = Goldilocks(pool=11, random_share=random_share)
    values = [expected_spread(*one) for one in evidence(rollouts, 11, stage.discount)]
    state = state_after(stage, rollouts)
    found = stage.select(offer(count, first=first, rollout=3, seed=6), state).tolist()
    assert found == fill(values, first + count, random_share, seed=6, rollout=3)[first:]


def test_what_was_known_of_a_prompt_fades_when_it_is_asked_again_and_only_then():
    """A prompt that was never solved, and then always: three rollouts later it is known to be solved."""
    stage = Goldilocks(pool=2, discount=0.25)
    rollouts = [[(0, 0, 0.0, 0)] * 8, *[[(0, 0, 1.0, 0)] * 8] * 3]
    rates = [float(pass_rates.expected_rate(state_after(stage, rollouts[:one]))[0]) for one in range(5)]
    assert rates == pytest.approx([1 / 2, 1 / 10, 9 / 12, 11 / 12.5, 11.5 / 12.625])
    idle = state_after(stage, [rollouts[0], *[[(1, 0, 1.0, 0)]] * 50])
    assert float(pass_rates.expected_rate(idle)[0]) == rates[1]


def test_what_it_reports():
    stage = Goldilocks(pool=4)
    state = state_after(stage, [[(0, 0, 1.0, 0)] * 2])
    batch = responses([(0, 5, 1.0, 0), (0, 5, 0.0, 0), (1, 6, 1.0, 0), (0, 7, 1.0, 4)])
    stat, _ = measure_all(stage, [batch], state, LocalComm())
    found = {name: one.value for name, one in stage.report(batch, stat, state).items()}
    assert found == {"known": 0.25, "expected_pass_rate": (3 / 4 + 1 / 2) / 2, "pass_rate": (1 / 2 + 1) / 2}
