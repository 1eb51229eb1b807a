"""What every selector obeys: one selection everywhere, refills that go on, a state that no cut can change."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.core.settings import settings_of
from rlstab.stages import STAGES
from rlstab.stages.goldilocks import Goldilocks
from rlstab.stages.goldilocks_teacher import GoldilocksTeacher
from rlstab.stages.in_order import InOrder
from rlstab.stages.paced import Paced
from rlstab.stages.stage import PromptSelector
from rlstab.stages.uniform import Uniform
from tests.core.says import says
from tests.stages.selections import offer, responses, settled_by_ranks

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
def test_a_selection_depends_on_the_offer_and_the_state_alone(selector, size):
    state, _ = state_after(selector, size, 3)
    asked = offer(6, rollout=3, size=size, features=features)
    before = copy.deepcopy(state)
    torch.manual_seed(1)
    noise, first = torch.get_rng_state(), selector.select(asked, state)
    assert torch.equal(noise, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, selector.select(asked, state))
    same(before, state)


@every_selector
def test_refills_go_on_where_their_rollout_ended(selector, size):
    """Cut anywhere, also where refills take the whole pool and begin it again."""
    state, _ = state_after(selector, size, 2)
    for total in (9, 60):
        rollout = {"rollout": 2, "size": size, "features": features}
        if total > POOL:  # a rollout of this many is refused, a refill is not
            start = selector.select(offer(POOL, drawn=12, **rollout), state)
            rest = selector.select(offer(total - POOL, first=POOL, drawn=12 + POOL, **rollout), state)
            whole = torch.cat([start, rest])
        else:
            whole = selector.select(offer(total, drawn=12, **rollout), state)
        for cut in (1, 4, 8):
            start = selector.select(offer(cut, drawn=12, **rollout), state)
            rest = selector.select(offer(total - cut, first=cut, drawn=12 + cut, **rollout), state)
            assert torch.cat([start, rest]).tolist() == whole.tolist()
        if isinstance(selector, GoldilocksTeacher) and size is None and selector.pool is None:
            assert len(set(whole.tolist())) == total  # nothing ever comes again
        elif not isinstance(selector, InOrder):
            turns = [whole[start : start + POOL].tolist() for start in range(0, total, POOL)]
            assert all(len(set(turn)) == len(turn) for turn in turns)


@every_selector
def test_no_cut_and_no_rank_changes_a_bit_of_the_state(selector, size):
    dice = random.Random(5)
    whole, cut, split = ([selector.init_state()] for _ in range(3))
    for rollout in range(5):
        asked = offer(6, rollout=rollout, size=size, features=features)
        prompts = [selector.select(asked, states[-1]).tolist() for states in (whole, cut, split)]
        assert prompts[0] == prompts[1] == prompts[2]
        rows = answered([*prompts[0], prompts[0][0]], dice)  # one prompt in two groups
        whole.append(measure_all(selector, [responses(rows)], whole[-1], LocalComm())[1])
        cut.append(measure_all(selector, parts_of(rows, dice), cut[-1], LocalComm())[1])
        ranks = [[] for _ in range(3)]
        for part in parts_of(rows, dice):
            dice.choice(ranks).append(part)
        states = settled_by_ranks(selector, ranks, split[-1])
        for one in (cut[-1], *states):
            same(whole[-1], one)
        split.append(states[-1])
    shapes = [{key: torch.as_tensor(one).shape for key, one in state.items()} for state in whole]
    assert all(one == shapes[0] for one in shapes)


@every_selector
def test_a_rollout_without_responses_is_one(selector, size):
    state, _ = state_after(selector, size, 2)
    after = measure_all(selector, [], state, LocalComm())[1]
    assert after.keys() == state.keys()
    assert all(torch.as_tensor(one).isfinite().all() for one in after.values())
    selector.select(offer(6, rollout=3, size=size, features=features), after)


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


@every_selector
def test_it_says_what_it_does(selector, size):
    text = selector.in_words()
    assert text[0].isupper()
    assert text.endswith(".")
    for one in settings_of(type(selector)):
        value = getattr(selector, one.name)
        if type(value) is int:
            assert str(value) in text


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
        (GoldilocksTeacher(pool=12), offer(16), "'goldilocks_teacher' was asked for 16 different prompts, and its ..."),
    ],
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


@pytest.mark.parametrize("cls", [Goldilocks, Paced])
def test_the_pool_is_required(cls):
    with pytest.raises(TypeError, match="pool"):
        cls()
