"""What every selector obeys: one selection everywhere, refills that go on, a state that no cut can change."""

from __future__ import annotations

import random

import pytest
import torch

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.stages import STAGES
from rlstab.stages.goldilocks import Goldilocks
from rlstab.stages.goldilocks_teacher import GoldilocksTeacher
from rlstab.stages.in_order import InOrder
from rlstab.stages.paced import Paced
from rlstab.stages.stage import PromptSelector
from rlstab.stages.uniform import Uniform
from tests.core.says import says
from tests.stages.selections import offer, responses

POOL = 23


def features(prompts):
    """Something that has to do with the number of a prompt."""
    angle = prompts.double().unsqueeze(1) * torch.tensor([0.1, 0.7, 1.9], dtype=torch.float64)
    return torch.cat([angle.cos(), angle.sin()], 1)


#: Each with the size of its task.
SELECTORS = [
    (InOrder(), POOL),
    (InOrder(shuffle=False), POOL),
    (InOrder(), None),
    (Uniform(), POOL),
    (Uniform(pool=POOL), None),
    (Goldilocks(pool=POOL), None),
    (Goldilocks(pool=POOL, discount=0.5, random_share=0.0), 40),
    (Paced(pool=POOL), None),
    (Paced(pool=POOL, target=0.3, discount=1.0, random_share=0.6), POOL),
    (GoldilocksTeacher(candidates=3, window=10), POOL),
    (GoldilocksTeacher(pool=POOL, window=64), None),
    (GoldilocksTeacher(candidates=4, window=30), None),
]
every_selector = pytest.mark.parametrize(("selector", "size"), SELECTORS, ids=lambda one: str(one))


def answered(prompts, dice):
    """Groups of responses to some prompts, with rewards that no float holds exactly, and branches."""
    rows = []
    for group, prompt in enumerate(prompts):
        given = dice.choice([0, 0, 0, 4])
        rows += [(prompt, group, dice.choice([0, 1, 0.1, 1 / 3, 1.7, -2]), given) for _ in range(dice.randint(1, 6))]
    return rows


def parts_of(rows, dice):
    """Whole groups dealt out to parts, some of them empty."""
    groups = sorted({row[1] for row in rows})
    dice.shuffle(groups)
    cut = [[] for _ in range(dice.randint(1, 5))]
    for group in groups:
        dice.choice(cut).append(group)
    return [responses([row for group in part for row in rows if row[1] == group]) for part in cut]


def state_after(selector, size, rollouts, seed=0):
    """The state after some rollouts of six prompts, and those that they had."""
    state, shown, dice = selector.init_state(), [], random.Random(seed)
    for rollout in range(rollouts):
        prompts = selector.select(offer(6, rollout=rollout, size=size, features=features), state).tolist()
        shown.append(prompts)
        state = measure_all(selector, [responses(answered(prompts, dice))], state, LocalComm())[1]
    return state, shown


def same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert type(value) is type(other[key])
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key


def test_every_selector_that_ships_is_here():
    ship = {name for name in STAGES.names() if issubclass(STAGES.get(name), PromptSelector)}
    assert ship == {one.name for one, _ in SELECTORS}


@every_selector
def test_a_selection_is_numbers_of_prompts(selector, size):
    state, shown = state_after(selector, size, 3)
    found = selector.select(offer(6, rollout=3, size=size, features=features), state)
    assert found.shape == (6,)
    assert found.dtype == torch.int64
    assert all(0 <= one and (size is None or one < size) for prompts in shown for one in prompts)
    assert all(len(set(prompts)) == 6 for prompts in shown) or isinstance(selector, InOrder)


@every_selector
def test_a_report_adds_up_over_parts(selector, size):
    state, shown = state_after(selector, size, 3)
    dice = random.Random(9)
    rows = answered(shown[-1], dice)
    stat, _ = measure_all(selector, [responses(rows)], state, LocalComm())
    whole = selector.report(responses(rows), stat, state)
    parts = [selector.report(part, stat, state) for part in [*parts_of(rows, dice), selector._empty_part()]]
    for name, one in whole.items():
        merged = parts[0][name]
        for part in parts[1:]:
            merged = merged.merge(part[name])
        assert merged.value == pytest.approx(one.value, rel=1e-12)


@pytest.mark.parametrize(
    ("selector", "asked", "text"),
    [
        (Uniform(), offer(16),
         "'uniform' draws from a finite pool, and the task makes prompts without end. Set its `pool`, for example "
         "pool: 256."),
        (Uniform(pool=12), offer(16),
         "'uniform' was asked for 16 different prompts, and its pool has 12. Raise `pool`, or lower rollout.prompts to "
         "at most 12."),
        (Uniform(), offer(16, size=12),
         "'uniform' was asked for 16 different prompts, and the task has 12. Lower rollout.prompts to at most 12."),
        (Uniform(pool=30), offer(16, size=20),
         "'uniform': pool = 30, and the task has 20 training prompts. Set `pool` to at most 20."),
        (Goldilocks(pool=12), offer(16), "'goldilocks' was asked for 16 different prompts, and its pool has 12. ..."),
        (Paced(pool=30), offer(16, size=20), "'paced': pool = 30, and the task has 20 training prompts. ..."),
        (GoldilocksTeacher(pool=12), offer(16), "'goldilocks_teacher' was asked for 16 different prompts, and its ...")
    ]
)  # fmt: skip
def test_a_pool_that_does_not_fit_is_refused(selector, asked, text):
    with says(ValueError, text):
        selector.select(asked, selector.init_state())


@pytest.mark.parametrize("cls", [Goldilocks, Paced])
def test_a_prompt_outside_of_the_pool_is_refused(cls):
    selector = cls(pool=4)
    with says(ValueError, f"'{cls.name}': pool = 4, and the prompt 4 was answered. Raise `pool`, or answer the prompts "
              "that the stage selects."):  # fmt: skip
        measure_all(selector, [responses([(0, 0, 1.0, 0), (4, 1, 1.0, 0)])], selector.init_state(), LocalComm())
