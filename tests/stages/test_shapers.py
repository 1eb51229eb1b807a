"""What shapers take from rewards, against loops over lists."""

import random
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest

from rlstab.core.method import State
from rlstab.core.stats import Settled
from rlstab.errors import OutOfRange
from rlstab.stages.laconic import Laconic
from rlstab.stages.overlong import Overlong
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import RewardShaper
from tests.stages.responses import batch, says, settled, values_of


@dataclass(frozen=True)
class Answer:
    """One response, in plain Python."""

    sampled: int
    given: int
    ended: bool

    @property
    def length(self) -> int:
        return self.sampled + self.given


def answers(count: int, limit: int, seed: int) -> list[Answer]:
    """Random answers, some of them branches, some cut off."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        given = rng.choice([0, 0, rng.randint(1, limit // 2)])
        sampled = rng.randint(1, limit - given)
        made.append(Answer(sampled, given, sampled + given < limit or rng.random() < 0.3))
    return made


def batch_of(those: list[Answer], limit: int) -> ResponseBatch:
    """The batch that holds them, in groups of four."""
    groups, ended = [place // 4 for place in range(len(those))], [answer.ended for answer in those]
    lengths, given = [answer.sampled for answer in those], [answer.given for answer in those]
    return batch([0.0] * len(those), groups, lengths, given=given, ended=ended, limit=limit)


def shaped(stage: RewardShaper, those: list[Answer], limit: int, state: State | None = None) -> list[float]:
    return stage.shape(batch_of(those, limit), Settled(), {} if state is None else state).tolist()


def charged(those: list[Answer], stage: Laconic, price: float) -> tuple[list[float], float]:
    """What each loses, and the price after it."""
    losses = []
    for answer in those:
        charge = price * max(0.0, (answer.length - stage.budget) / stage.budget)
        losses.append(-(min(charge, stage.most) + (0.0 if answer.ended else stage.cut)))
    mean = sum(answer.length for answer in those) / len(those)
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
        those = answers(48, 60, seed=rollout)
        expected, after = charged(those, stage, price)
        assert shaped(stage, those, 60, state) == pytest.approx(expected, abs=1e-12)
        report = values_of(stage.report(batch_of(those, 60), Settled(), state))
        assert report == pytest.approx({"multiplier": price, "penalty": -sum(expected) / 48}, abs=1e-12)
        _, state = settled(stage, batch_of(those, 60), state=state)
        price = after


def punished(those: list[Answer], limit: int, buffer: int, penalty: float) -> list[float]:
    """The three cases of the paper, in exact arithmetic."""
    values = []
    for answer in those:
        if answer.length <= limit - buffer:
            part = Fraction(0)
        elif answer.length <= limit:
            part = Fraction((limit - buffer) - answer.length, buffer)
        else:
            part = Fraction(-1)
        values.append(float(part * Fraction(penalty)))
    return values


@pytest.mark.parametrize(("buffer", "penalty"), [(1, 1.0), (7, 1.0), (30, 0.25), (40, 2.5)])
def test_the_three_cases_of_overlong(buffer: int, penalty: float) -> None:
    stage, those = Overlong(buffer=buffer, penalty=penalty), answers(200, 40, seed=buffer)
    expected = punished(those, 40, buffer, penalty)
    assert shaped(stage, those, 40) == pytest.approx(expected, abs=1e-12)
    assert min(expected) < 0 == max(expected) or buffer == 40
    report = values_of(stage.report(batch_of(those, 40), Settled(), {}))
    share = sum(loss < 0 for loss in expected) / 200
    assert report == pytest.approx({"penalty": -sum(expected) / 200, "share": share}, abs=1e-12)


def test_a_buffer_beyond_the_limit_is_refused() -> None:
    with says(OutOfRange, "'overlong': buffer = 4096 is more than the 24 tokens that an answer may have, so that ..."):
        shaped(Overlong(buffer=4096), [Answer(20, 0, False)], 24)
    assert shaped(Overlong(buffer=4096), [], 1) == []  # a rank without responses


def test_bounds_in_the_wrong_order_are_refused() -> None:
    with says(OutOfRange, "'laconic': floor = 0.2, ceiling = 0.1, expected floor <= ceiling."):
        Laconic(budget=10.0, floor=0.2)
