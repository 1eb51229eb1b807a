"""Every sign fires where its definition holds and nowhere else, on a whole run and on its beginning."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstab.bins import binned
from rlstab.report.collapse import DETECTORS
from rlstab.report.runs import RunRecord
from rlstab.signs import SIGNS, reward_fall, signs
from tests.report.conftest import record

DATA = Path(__file__).parent / "diagnose" / "data"
LENGTH = 100
FLAT = [0.3] * LENGTH


def noisy(values: Sequence[float], size: float = 0.03) -> list[float]:
    return (np.array(values) + size * np.random.default_rng(1).normal(size=len(values))).tolist()


def ramp(first: float, last: float, start: int = 0) -> list[float]:
    """``first`` up to a rollout, then straight to ``last``."""
    return [first] * start + np.linspace(first, last, LENGTH - start).tolist()


def norms(values: list[float]) -> dict[str, list[float]]:
    return {"gradient/norm": values, "gradient/largest_norm": values}


SPIKE = norms([31.5 if place == 44 else 0.5 for place in range(LENGTH)])
EQUAL = [*ramp(0.5, 1.0, start=30)[:60], *[0.99] * 40]
START = [{"rollout": 0, "eval/mean": 0.35}]
#: A sign, curves, and the step at which it begins; None where it is not there.
CASES: list[tuple[str, dict[str, Any], int | None]] = [
    ("reward_fall", {"reward/mean": noisy([*ramp(0.2, 0.4)[:60], *np.linspace(0.3, 0.05, 40)])}, 77),
    ("reward_fall", {"reward/mean": [0.05] * 10 + [0.0] * 90}, 11),  # died at once
    ("reward_fall", {"reward/mean": noisy(ramp(0.15, 0.4))}, None),
    ("reward_fall", {"reward/mean": noisy(FLAT, 0.1)}, None),  # noise has a peak too
    ("reward_fall", {"reward/mean": [0.0] * LENGTH}, None),  # nothing to fall from
    # bins jump by as much as the last one is low
    ("reward_fall", {"reward/mean": [*([0.1, 0.9] * 5 + [0.1] * 10) * 4, *[0.2] * 20]}, None),
    # 0.25 x the mean of the first ten, 0.383, is passed on the way to 0.02 about rollout 80
    ("entropy_floor", {"tokens/entropy": ramp(0.4, 0.02)}, 81),
    ("entropy_floor", {"tokens/entropy": ramp(0.4, 0.15)}, None),
    ("entropy_floor", {"tokens/entropy": [0.015] * LENGTH}, 1),
    ("entropy_blow_up", {"tokens/entropy": ramp(0.4, 1.0, start=50)}, 68),
    ("entropy_blow_up", {"tokens/entropy": ramp(0.4, 0.5)}, None),
    ("gradient_spikes", SPIKE, 45),
    ("gradient_spikes", norms(ramp(0.5, 2.5)), None),
    ("gradient_spikes", norms([0.5] * 30 + [0.001] * 70), None),  # ordinary norms before the gradient vanished
    ("zero_std_groups", {"reward/zero_std_groups": EQUAL, "reward/mean": ramp(0.2, 0.0)}, 61),
    ("zero_std_groups", {"reward/zero_std_groups": EQUAL, "reward/mean": ramp(0.2, 0.99, start=10)}, None),  # solved
    ("zero_std_groups", {"reward/zero_std_groups": FLAT, "reward/mean": FLAT}, None),
    ("truncation", {"response/ended": ramp(1.0, 0.6, start=40)}, 56),
    ("truncation", {"response/ended": [0.7] * LENGTH}, None),  # so from the start
    ("refused_steps", {"optimizer_steps/refused": [2.0 * (place == 33) for place in range(LENGTH)]}, 34),
    ("refused_steps", {"gradient/norm": FLAT}, None),
    ("below_start", {"reward/mean": ramp(0.3, 0.2)}, 6),
    ("below_start", {"reward/mean": FLAT}, None),
    # an evaluation has no flaky grader, so what it is compared with has none either
    ("below_start", {"reward/mean": ramp(0.15, 0.2), "reward/true": ramp(0.3, 0.4), "evaluations": START}, None),
    ("below_start", {"reward/mean": FLAT, "evaluations": START}, 1),
]


def at(shapes: dict[str, Any], bin_width: int) -> RunRecord:
    """The curves as a folder has them, or as a results file does, in bins of ten."""
    run = record(shapes)
    if bin_width == 1:
        return run
    return record({}, metrics={name: binned(run, name) for name in shapes}, largest=run.largest, bin_width=bin_width)


@pytest.mark.parametrize("bin_width", [1, 10])
def test_signs_fire_where_their_definition_holds_and_nowhere_else(bin_width: int) -> None:
    assert DETECTORS.keys() == {name for name, *_ in CASES}
    for name, values, when in CASES:
        shapes = {key: curve for key, curve in values.items() if key != "evaluations"}
        run = at(shapes, bin_width)
        run.evaluations.extend(values.get("evaluations", []))
        sign = DETECTORS[name].detect(run)
        assert sign.fired is (when is not None), (name, sign)
        if when is None or bin_width == 1:
            assert sign.step == when, (name, sign)
        else:  # by bins it begins at an end
            assert sign.step in (-(-when // 10) * 10, -(-when // 10) * 10 + 10), (name, sign)


def test_what_is_too_short_or_not_there_says_nothing() -> None:
    short = record({name: [0.1] * 20 for name in ("reward/mean", "tokens/entropy")})
    told = {name: detector.detect(short) for name, detector in DETECTORS.items()}
    assert {sign.fired for sign in told.values()} == {None}
    assert told["reward_fall"].text == "20 values in 2 x 10 steps; 3 x 10 are needed"
    assert told["truncation"].text == "no response/ended"


def falling(shape: str, length: int, size: float, seed: int) -> list[float]:
    """Rewards of a shape, with noise."""
    t = np.linspace(0, 1, length)
    rewards = {
        "steady": 0.8 * (1 - t),
        "to a third": 0.9 - 0.7 * t,
        "at once": np.where(t < 0.1, 0.6, 0.05),
        "late": np.where(t < 0.6, 0.5 + 0.3 * t, 0.1),
        "curved": 0.7 * (1 - t) ** 2,
        "negative": 0.5 - 1.4 * t,
        "flat": np.full(length, 0.8),
        "rising": 0.2 + 0.5 * t,
        "saturating": 0.2 + 0.6 * (1 - np.exp(-5 * t)),
        "a little": 0.8 - 0.15 * t,
        "recovering": 0.6 - 0.5 * np.exp(-(((t - 0.4) / 0.15) ** 2)),
        "always negative": -0.8 + 0.3 * t,
    }[shape]
    noise = np.random.default_rng(seed).uniform(-size, size, length)
    return (rewards + noise).tolist()


FALLS = ("steady", "to a third", "at once", "late", "curved", "negative")
HOLDS = ("flat", "rising", "saturating", "a little", "recovering", "always negative")


@pytest.mark.parametrize("shape", FALLS + HOLDS)
def test_a_reward_that_falls_is_told_from_one_that_is_noisy(shape: str) -> None:
    for length in (30, 40, 200):
        for size in (0.0, 0.02, 0.08):
            for seed in range(3):
                rewards = falling(shape, length, size, seed)
                sign = reward_fall.detect(record({"reward/mean": rewards}))
                assert sign.fired is (shape in FALLS), (length, size, seed, sign)
                if sign.step is not None:  # never before its own peak
                    top = int(sign.text.partition("around step ")[2].split(",")[0])
                    assert sign.step > top, sign


@pytest.mark.parametrize("name", ["staleness", "learning_rate", "truncation", "healthy"])
def test_a_run_is_judged_as_it_goes_on(name: str) -> None:
    lines = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["rollout"]]
    columns = {key: [line.get(key, np.nan) for line in lines] for key in lines[-1]}
    fired: dict[str, int] = {}
    for length in range(0, len(lines) + 1, 3):
        for sign in signs(record({key: values[:length] for key, values in columns.items()})):
            if sign.fired:
                assert 0 < (sign.step or 0) <= length
                fired.setdefault(sign.name, length)
    assert bool(fired) is (name != "healthy")
    assert fired.keys() <= SIGNS.keys()
