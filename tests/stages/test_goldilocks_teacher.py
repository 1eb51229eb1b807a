"""Goldilocks by its teacher: what it learns from, and which candidates each slot gets."""

import pytest
import torch

from rlstab.stages.goldilocks_teacher import GoldilocksTeacher
from rlstab.stages.half_sigmoid import HalfSigmoid
from rlstab.stages.slots import DICE
from tests.stages.responses import settled
from tests.stages.selections import number, offer, order_of, rollouts_of, state_after


def features(prompts):
    return torch.stack([(prompts.double() * 0.37).sin(), (prompts.double() * 1.3).cos()], 1)


def window_of(rollouts, length):
    """The newest (prompt, worth), rollout by rollout, and prompt by prompt within one."""
    window = []
    for rows in rollouts:
        for prompt in sorted({row[0] for row in rows if row[3] == 0}):
            rewards = [min(max(reward, 0.0), 1.0) for of, _, reward, given in rows if of == prompt and given == 0]
            rate = sum(rewards) / len(rewards)
            window.append((prompt, (rate * (1 - rate)) ** 0.5))
    return window[-length:]


def expected_values(rollouts, stage, pool):
    """What the teacher expects of each prompt of the pool; its fit is tested by itself."""
    prompts, worth = zip(*window_of(rollouts, stage.window), strict=True)
    fit = HalfSigmoid.fit(features(torch.tensor(prompts)), torch.tensor(worth, dtype=torch.float64), stage.ridge)
    return [round(value, 9) for value in fit(features(torch.arange(pool))).tolist()]


def deal(values, slots, candidates, random_share, seed, rollout):
    """What each slot takes, of hands that are dealt from lists."""
    pool, taken, chosen, turn = len(values), [], [], 0
    deck = order_of(seed, rollout, 0, pool)
    for slot in range(slots):
        if not deck:
            turn += 1
            taken = [] if len(taken) == pool else taken
            deck = [prompt for prompt in order_of(seed, rollout, turn, pool) if prompt not in taken]
        hand, deck = deck[:candidates], deck[candidates:]
        best = hand[0]
        if number(seed + DICE, rollout, slot) >= random_share:
            for prompt in hand[1:]:
                if values[prompt] > values[best]:
                    best = prompt
        taken.append(best)
        chosen.append(best)
    return chosen


@pytest.mark.parametrize("length", [3, 8, 100])
def test_the_state_is_the_window(length):
    stage, rollouts = GoldilocksTeacher(pool=9, window=length), rollouts_of(9, 4, seed=1)
    for count in range(5):
        state, expected = state_after(stage, rollouts[:count]), window_of(rollouts[:count], length)
        assert state["filled"] == len(expected)
        prompts, worth = zip(*expected, *[(0, 0.0)] * (length - len(expected)), strict=True)
        assert state["prompts"].tolist() == list(prompts)
        assert state["worth"].tolist() == pytest.approx(worth, abs=1e-5)  # rewards are rounded
    assert stage.report(stage._empty_part(), settled(stage)[0], state)["window"].value == state["filled"]


@pytest.mark.parametrize("random_share", [0.0, 0.4])
@pytest.mark.parametrize("candidates", [1, 3, 50])
@pytest.mark.parametrize(("first", "count", "pool", "size"), [(6, 4, 19, None), (10, 45, None, 19)])
def test_the_selection_equals_the_oracle(random_share, candidates, first, count, pool, size):
    stage = GoldilocksTeacher(pool=pool, candidates=candidates, random_share=random_share, window=12)
    rollouts = rollouts_of(19, 4, seed=5)
    values = expected_values(rollouts, stage, 19)
    asked = offer(count, first=first, rollout=4, size=size, seed=7, features=features)
    chosen = stage.select(asked, state_after(stage, rollouts)).tolist()
    assert chosen == deal(values, first + count, candidates, random_share, 7, 4)[first:]


@pytest.mark.parametrize("random_share", [0.0, 0.4])
def test_a_task_without_end_deals_the_next_prompts_to_each_slot(random_share):
    stage = GoldilocksTeacher(candidates=5, random_share=random_share, window=12)
    rollouts = rollouts_of(60, 4, seed=5)
    values = expected_values(rollouts, stage, 200)
    chosen = stage.select(offer(4, first=2, rollout=4, drawn=30, features=features), state_after(stage, rollouts))
    for slot, prompt in enumerate(chosen.tolist()):
        hand = range((30 + slot) * 5, (31 + slot) * 5)
        random = number(DICE, 4, 2 + slot) < random_share
        assert prompt == (hand[0] if random else max(hand, key=values.__getitem__))


@pytest.mark.parametrize("how", ["random", "unlearnt", "blind"])
@pytest.mark.parametrize("size", [40, None])
def test_without_a_choice_each_slot_takes_its_first_candidate(how, size):
    stage = GoldilocksTeacher(candidates=4, random_share=float(how == "random"))
    state = stage.init_state() if how == "unlearnt" else state_after(stage, rollouts_of(13, 2, seed=3))
    blind = {"features": features if how != "blind" else lambda prompts: torch.ones(len(prompts), 2).double()}
    chosen = stage.select(offer(5, rollout=2, size=size, drawn=10, **blind), state).tolist()
    deck = list(range(40, 60)) if size is None else order_of(0, 2, 0, size)
    assert chosen == deck[:20:4]


def test_features_are_asked_for_once_and_for_no_prompt_twice():
    asked = []

    def watched(prompts):
        asked.append(prompts.tolist())
        return features(prompts)

    stage = GoldilocksTeacher(pool=40, candidates=4)
    state = state_after(stage, rollouts_of(13, 4, seed=3))
    stage.select(offer(5, rollout=4, features=watched), state)
    assert len(asked) == 1
    assert len(asked[0]) == len(set(asked[0])) <= 13 + 20
