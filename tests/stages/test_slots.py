"""Filling slots: what decides between prompts that are equal, and what sums do to them."""

from __future__ import annotations

import random

import torch

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.stages.goldilocks import Goldilocks
from rlstab.stages.slots import best_first, filled, shuffled
from tests.stages.selections import offer, responses


def test_values_that_differ_by_a_rounding_are_equal():
    """Each of the two comes first about as often; by one more decimal the larger always does."""
    rollouts = [offer(1, rollout=one) for one in range(400)]
    for apart, share in ((1e-12, 0.5), (1e-7, 0.0)):
        values = torch.tensor([0.3, 0.3 + apart], dtype=torch.float64)
        first = sum(int(best_first(one, values)[0] == 0) for one in rollouts) / 400
        assert abs(first - share) <= 5 * (share * (1 - share) / 400) ** 0.5


def test_what_is_taken_at_random_does_not_depend_on_which_of_equal_ones_were_taken():
    """Two equal prompts: whichever comes first by value, the other order puts each in front half of the time."""
    rollouts = [offer(1, rollout=one) for one in range(400)]
    agree = sum(int(best_first(one, torch.zeros(2))[0] == shuffled(one, 2)[0]) for one in rollouts) / 400
    assert abs(agree - 0.5) < 5 * 0.5 / 20


def test_ranked_prompts_are_taken_in_their_order():
    ranked = torch.tensor([3, 1, 4, 0, 2])
    assert filled(offer(4), ranked, 0.0).tolist() == [3, 1, 4, 0]
    assert filled(offer(3, first=1), ranked, 0.0).tolist() == [1, 4, 0]
    assert filled(offer(4, first=3), ranked, 0.0).tolist() == [0, 2, 3, 1]  # the pool begins again


def test_no_order_of_the_rewards_changes_a_bit_of_the_evidence():
    """Sums of 0.1, 1/3 and so on depend on their order: in float64 these have several values."""
    rewards = [0.1, 1 / 3, 0.7, 0.01, 1e-9, 0.3, 0.6, 0.123]
    stage, dice = Goldilocks(pool=1), random.Random(0)
    sums, states = set(), set()
    for _ in range(30):
        dice.shuffle(rewards)
        sums.add(sum(rewards))
        parts = [responses([(0, group, one, 0)]) for group, one in enumerate(rewards)]
        state = measure_all(stage, parts, stage.init_state(), LocalComm())[1]
        states.add((float(state["right"]), float(state["wrong"])))
    assert len(sums) > 1
    assert len(states) == 1
