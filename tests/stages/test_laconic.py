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
