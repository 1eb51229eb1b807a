"""Dynamic sampling against plain loops over lists."""

import random

import pytest

from rlstab.stages.dynamic_sampling import DynamicSampling
from rlstab.stages.response_batch import ResponseBatch
from tests.stages.responses import batch as batch_of
from tests.stages.responses import settled, values_of


def batch(*groups: list[float], branches: tuple[int, ...] = (), raw: list[float] | None = None) -> ResponseBatch:
    """One group after another; those in ``branches`` are made of ends of other answers."""
    places = [place for place, group in enumerate(groups) for _ in group]
    rewards = [reward for group in groups for reward in group]
    given = [5 * (place in branches) for place in places]
    return batch_of(rewards, [7 * place + 3 for place in places], extra=raw and {"raw_rewards": raw}, given=given)


def asked(stage: DynamicSampling, part: ResponseBatch):
    stat, state = settled(stage, part)
    assert state == {}
    return stage.expand(part, stat, state, seed=0)


@pytest.mark.parametrize("seed", range(2))
def test_drops_what_is_even_and_asks_for_as_many_prompts(seed: int) -> None:
    dice = random.Random(seed)
    groups = [[dice.choice([0.0, 1.0, 0.1]) for _ in range(dice.randint(1, 4))] for _ in range(dice.randint(1, 9))]
    branches = tuple(place for place in range(len(groups)) if dice.random() < 0.3)
    even = [all(reward == group[0] for reward in group) for group in groups]
    expansion = asked(DynamicSampling(), batch(*groups, branches=branches))
    assert expansion.drop.tolist() == [even[place] for place, group in enumerate(groups) for _ in group]
    assert expansion.fresh == sum(even[place] for place in range(len(groups)) if place not in branches)
    assert expansion.parents is None


def test_a_penalty_makes_a_group_uneven_unless_raw_rewards_are_compared() -> None:
    """All right, one of them too long; and one that is right and too long next to one that is wrong."""
    some = batch([1.0, 0.6], [0.0, 0.0], raw=[1.0, 1.0, 1.0, 0.0])
    shaped, raw = asked(DynamicSampling(), some), asked(DynamicSampling(rewards="raw"), some)
    assert (shaped.drop.tolist(), shaped.fresh) == ([False, False, True, True], 1)
    assert (raw.drop.tolist(), raw.fresh) == ([True, True, False, False], 1)


def test_without_refills_it_only_drops() -> None:
    stage = DynamicSampling(max_refills=0)
    expansion = asked(stage, batch([1.0, 1.0], [0.0, 1.0]))
    assert (expansion.drop.tolist(), expansion.fresh, stage.rounds) == ([True, True, False, False], 0, 1)


def test_report_says_what_it_cost() -> None:
    stage, whole = DynamicSampling(), batch([1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0, 0.0], branches=(2, 3))
    parts = [whole.select(whole.group < 2), whole.select(whole.group >= 2)]
    stat, state = settled(stage, *parts)
    first, second = (stage.report(part, stat, state) for part in parts)
    # prompts: one of two even; branches: one of two; 9 responses for 5 that are learnt from
    assert values_of({name: first[name].merge(second[name]) for name in first}) == {
        "dropped": 0.5,
        "dropped_branches": 0.5,
        "dropped_groups": 1.0,
        "sampled_per_learnt": 9 / 5,
    }
