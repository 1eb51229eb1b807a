"""Dynamic sampling against plain loops over lists."""

from __future__ import annotations

import random

import pytest
import torch

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.stages.dynamic_sampling import DynamicSampling
from rlstab.stages.response_batch import ResponseBatch


def batch(*groups: list[float], branches: tuple[int, ...] = (), raw: list[list[float]] | None = None) -> ResponseBatch:
    """One group after another; those in ``branches`` are made of ends of other answers."""
    rewards = torch.tensor([one for group in groups for one in group], dtype=torch.float64)
    ids = torch.tensor([7 * place + 3 for place, group in enumerate(groups) for _ in group], dtype=torch.int64)
    given = torch.tensor([5 * (place in branches) for place, group in enumerate(groups) for _ in group]).long()
    extra = (
        {}
        if raw is None
        else {"raw_rewards": torch.tensor([one for group in raw for one in group], dtype=torch.float64)}
    )
    count = len(rewards)
    return ResponseBatch(
        rewards,
        torch.full((count,), 8.0, dtype=torch.float64),
        torch.ones(count, dtype=torch.bool),
        ids,
        ids,
        torch.arange(count),
        given,
        given / 10,
        8,
        extra,
    )


def asked(stage: DynamicSampling, *parts: ResponseBatch):
    stat, state = measure_all(stage, parts, stage.init_state(), LocalComm())
    assert state == {}
    return [stage.expand(part, stat, state, seed=0) for part in parts]


def by_hand(groups, branches):
    """Which responses go, and how many prompts come."""
    drop, fresh = [], 0
    for place, group in enumerate(groups):
        even = all(one == group[0] for one in group)
        drop += [even] * len(group)
        fresh += even and place not in branches
    return drop, fresh


@pytest.mark.parametrize("seed", range(2))
def test_drops_what_is_even_and_asks_for_as_many_prompts(seed: int) -> None:
    dice = random.Random(seed)
    groups = [[dice.choice([0.0, 1.0, 0.1]) for _ in range(dice.randint(1, 4))] for _ in range(dice.randint(1, 9))]
    branches = tuple(place for place in range(len(groups)) if dice.random() < 0.3)
    (found,) = asked(DynamicSampling(), batch(*groups, branches=branches))
    assert (found.drop.tolist(), found.fresh) == by_hand(groups, branches)
    assert found.parents is None


def test_a_penalty_makes_a_group_uneven_unless_raw_rewards_are_compared() -> None:
    """All right, one of them too long; and one that is right and too long beside one that is wrong."""
    some = batch([1.0, 0.6], [0.0, 0.0], raw=[[1.0, 1.0], [1.0, 0.0]])
    (shaped,), (raw,) = asked(DynamicSampling(), some), asked(DynamicSampling(rewards="raw"), some)
    assert (shaped.drop.tolist(), shaped.fresh) == ([False, False, True, True], 1)
    assert (raw.drop.tolist(), raw.fresh) == ([True, True, False, False], 1)


def test_without_refills_it_only_drops() -> None:
    stage = DynamicSampling(max_refills=0)
    (found,) = asked(stage, batch([1.0, 1.0], [0.0, 1.0]))
    assert (found.drop.tolist(), found.fresh, stage.rounds) == ([True, True, False, False], 0, 1)


def test_report_says_what_it_cost() -> None:
    stage, whole = DynamicSampling(), batch([1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0, 0.0], branches=(2, 3))
    parts = [whole.select(whole.group < 2), whole.select(whole.group >= 2)]
    stat, state = measure_all(stage, parts, stage.init_state(), LocalComm())
    both = [stage.report(one, stat, state) for one in parts]
    merged = {name: both[0][name].merge(both[1][name]).value for name in both[0]}
    # prompts: one of two even; branches: one of two; 9 responses for 5 that are learnt from
    assert merged == {"dropped": 0.5, "dropped_branches": 0.5, "dropped_groups": 1.0, "sampled_per_learnt": 9 / 5}
