"""What shapers take from rewards, against loops over lists."""

import random
from fractions import Fraction
from typing import Any

import pytest

from rlstab.core.stats import Settled
from rlstab.errors import OutOfRange
from rlstab.stages.laconic import Laconic
from rlstab.stages.overlong import Overlong
from rlstab.stages.response_batch import ResponseBatch
from tests.stages.responses import batch, settled, values_of


def drawn(count: int, limit: int, seed: int) -> ResponseBatch:
    """Random responses in groups of four, some of them branches, some cut off."""
    rng = random.Random(seed)
    given = [rng.choice([0, 0, rng.randint(1, limit // 2)]) for _ in range(count)]
    sampled = [rng.randint(1, limit - before) for before in given]
    ended = [a + b < limit or rng.random() < 0.3 for a, b in zip(given, sampled, strict=True)]
    groups = [place // 4 for place in range(count)]
    return batch([0.0] * count, groups, sampled, given=given, ended=ended, limit=limit)


def lengths_of(responses: ResponseBatch) -> list[float]:
    """With what a branch was given."""
    return [float(length) for length in responses.lengths + responses.given]


def charged(responses: ResponseBatch, stage: Laconic, price: float) -> tuple[list[float], float]:
    """What each loses, and the price after it."""
    losses, lengths = [], lengths_of(responses)
    for length, ended in zip(lengths, responses.ended.tolist(), strict=True):
        charge = price * max(0.0, (length - stage.budget) / stage.budget)
        losses.append(-(min(charge, stage.most) + (0.0 if ended else stage.cut)))
    mean = sum(lengths) / len(lengths)
    return losses, sorted((stage.floor, price + stage.step * (mean / stage.budget - 1), stage.ceiling))[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"budget": 10.0, "step": 0.05, "ceiling": 0.3},
        {"budget": 25.0, "step": 0.5, "floor": 0.05, "ceiling": 0.2, "most": 0.1, "cut": 0.0},
        {"budget": 100.0, "step": 0.1, "floor": 0.01, "ceiling": 1.0, "cut": 0.3},
        {"budget": 7.5, "step": 2.0, "ceiling": 5.0, "most": 100.0},
    ],
)
def test_laconic_over_five_rollouts(settings: dict[str, Any]) -> None:
    stage = Laconic(**settings)
    state, price = stage.init_state(), stage.floor
    for rollout in range(5):
        responses = drawn(48, 60, seed=rollout)
        expected, after = charged(responses, stage, price)
        assert stage.shape(responses, Settled(), state).tolist() == pytest.approx(expected, abs=1e-12)
        report = values_of(stage.report(responses, Settled(), state))
        assert report == pytest.approx({"multiplier": price, "penalty": -sum(expected) / 48}, abs=1e-12)
        _, state = settled(stage, responses, state=state)
        price = after


def punished(responses: ResponseBatch, buffer: int, penalty: float) -> list[float]:
    """The three cases of the paper, in exact arithmetic."""
    values, limit = [], responses.limit
    for length in map(int, lengths_of(responses)):
        if length <= limit - buffer:
            part = Fraction(0)
        elif length <= limit:
            part = Fraction((limit - buffer) - length, buffer)
        else:
            part = Fraction(-1)
        values.append(float(part * Fraction(penalty)))
    return values


@pytest.mark.parametrize(("buffer", "penalty"), [(1, 1.0), (7, 1.0), (30, 0.25), (40, 2.5)])
def test_the_three_cases_of_overlong(buffer: int, penalty: float) -> None:
    stage, responses = Overlong(buffer=buffer, penalty=penalty), drawn(200, 40, seed=buffer)
    expected = punished(responses, buffer, penalty)
    assert stage.shape(responses, Settled(), {}).tolist() == pytest.approx(expected, abs=1e-12)
    assert min(expected) < 0 == max(expected) or buffer == 40
    report = values_of(stage.report(responses, Settled(), {}))
    share = sum(loss < 0 for loss in expected) / 200
    assert report == pytest.approx({"penalty": -sum(expected) / 200, "share": share}, abs=1e-12)


def test_bounds_that_do_not_fit_are_refused() -> None:
    stage = Overlong(buffer=4096)
    with pytest.raises(OutOfRange, match="'overlong': buffer = 4096"):
        stage.shape(drawn(1, 24, seed=0), Settled(), {})
    assert stage.shape(drawn(0, 1, seed=0), Settled(), {}).tolist() == []  # a rank without responses
    with pytest.raises(OutOfRange, match="'laconic': floor = "):
        Laconic(budget=10.0, floor=0.2)
