"""The price on tokens beyond a budget against loops over lists."""

from __future__ import annotations

import pytest

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.core.stats import Settled
from rlstab.errors import OutOfRange
from rlstab.stages.laconic import Laconic
from tests.stages.shaped import Answer, answers, batch_of

LIMIT = 60
SETTINGS = [
    {"budget": 10.0, "step": 0.05, "ceiling": 0.3},
    {"budget": 25.0, "step": 0.5, "floor": 0.05, "ceiling": 0.2, "most": 0.1, "cut": 0.0},
    {"budget": 100.0, "step": 0.1, "floor": 0.01, "ceiling": 1.0, "cut": 0.3},
    {"budget": 7.5, "step": 2.0, "ceiling": 5.0, "most": 100.0},
]


def shaped(stage: Laconic, found: list[Answer], state: object) -> list[float]:
    assert isinstance(state, dict)
    return stage.shape(batch_of(found, LIMIT), Settled(), state).tolist()


def independent(found: list[Answer], stage: Laconic, price: float) -> tuple[list[float], float]:
    """What each loses, and the price after it."""
    values, total = [], 0.0
    for one in found:
        length = one.sampled + one.given
        total += length
        charge = price * max(0.0, (length - stage.budget) / stage.budget)
        values.append(-(min(charge, stage.most) + (0.0 if one.ended else stage.cut)))
    if found:
        price = price + stage.step * (total / len(found) / stage.budget - 1)
        price = stage.floor if price < stage.floor else stage.ceiling if price > stage.ceiling else price
    return values, price


@pytest.mark.parametrize("settings", SETTINGS)
def test_five_rollouts(settings: dict[str, float]) -> None:
    stage = Laconic(**settings)
    state, price = stage.init_state(), stage.floor
    assert state == {"multiplier": stage.floor}
    for rollout in range(5):
        found = answers(48, LIMIT, seed=rollout)
        expected, price_after = independent(found, stage, price)
        assert shaped(stage, found, state) == pytest.approx(expected, abs=1e-12)
        _, state = measure_all(stage, [batch_of(found, LIMIT)], state, LocalComm())
        assert state["multiplier"] == pytest.approx(price_after, abs=1e-12)
        price = price_after
    assert stage.floor <= state["multiplier"] <= stage.ceiling


def test_the_multiplier_meets_floor_and_ceiling() -> None:
    stage = Laconic(budget=10.0, step=1.0, floor=0.02, ceiling=0.3)
    long, short = [Answer(1.0, 40, 0, True, 0)], [Answer(1.0, 1, 0, True, 0)]
    _, high = measure_all(stage, [batch_of(long, LIMIT)], stage.init_state(), LocalComm())
    assert high == {"multiplier": 0.3}
    _, low = measure_all(stage, [batch_of(short, LIMIT)], high, LocalComm())
    assert low == {"multiplier": 0.02}


def test_short_answers_make_up_for_long_ones() -> None:
    stage = Laconic(budget=20.0, step=1.0, floor=0.0, ceiling=1.0)
    found = [Answer(1.0, 30, 0, True, 0), Answer(0.0, 10, 0, True, 0)]
    _, after = measure_all(stage, [batch_of(found, LIMIT)], {"multiplier": 0.5}, LocalComm())
    assert after == {"multiplier": 0.5}  # the mean is the budget, though one is above it
    assert shaped(stage, found, after) == [-0.25, 0.0]


def test_the_tokens_that_a_branch_was_given_count() -> None:
    stage = Laconic(budget=10.0, step=1.0, ceiling=1.0)
    branch, whole = [Answer(1.0, 5, 10, True, 0)], [Answer(1.0, 15, 0, True, 0)]
    assert shaped(stage, branch, {"multiplier": 0.5}) == shaped(stage, whole, {"multiplier": 0.5}) == [-0.25]
    ends = [measure_all(stage, [batch_of(one, LIMIT)], {"multiplier": 0.1}, LocalComm())[1] for one in (branch, whole)]
    assert ends[0] == ends[1] == {"multiplier": pytest.approx(0.6)}


def test_what_is_cut_off_pays_once() -> None:
    stage = Laconic(budget=10.0, most=0.4, cut=0.1)
    at_limit = [Answer(0.0, LIMIT, 0, False, 0), Answer(0.0, LIMIT, 0, True, 0)]
    assert shaped(stage, at_limit, {"multiplier": 0.0}) == [-0.1, 0.0]  # ended with its very last token
    assert shaped(stage, at_limit, {"multiplier": 9.0}) == [-0.5, -0.4]


@pytest.mark.parametrize("settings", [{"step": 0.0, "cut": 0.0}, {"most": 0.0, "cut": 0.0}])
def test_it_changes_nothing_at_its_limits(settings: dict[str, float]) -> None:
    stage = Laconic(budget=10.0, **settings)
    state = stage.init_state()
    for rollout in range(3):
        batch = batch_of(answers(24, LIMIT, seed=rollout), LIMIT)
        assert not stage.shape(batch, Settled(), state).any()
        _, state = measure_all(stage, [batch], state, LocalComm())


def test_report() -> None:
    stage, found = Laconic(budget=10.0), answers(20, LIMIT, seed=8)
    report = stage.report(batch_of(found, LIMIT), Settled(), {"multiplier": 0.1})
    expected, _ = independent(found, stage, 0.1)
    assert report["penalty"].value == pytest.approx(-sum(expected) / 20, abs=1e-12)
    assert report["multiplier"].value == 0.1


def test_floor_above_ceiling() -> None:
    with pytest.raises(OutOfRange) as caught:
        Laconic(budget=10.0, floor=0.2)
    assert str(caught.value) == ("'laconic': floor = 0.2, ceiling = 0.1, expected floor <= ceiling.")
