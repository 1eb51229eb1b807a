"""Every sign fires where its definition holds and nowhere else, on a whole run and on its beginning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstab.bins import binned
from rlstab.logs.watch import Watch
from rlstab.report.runs import RunRecord
from rlstab.signs import COUNTED, SIGNS, counted_signs, reward_fall, signs
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


SPIKES = norms([31.5 if place in (44, 60, 75) else 0.5 for place in range(LENGTH)])
#: One group of two differs in every other step, so the norm has a heavy tail, and a single spike.
HEAVY = norms([0.0 if place % 2 else 0.1 * 3 ** ((place // 2) % 5) for place in range(LENGTH)])
EQUAL = [*ramp(0.5, 1.0, start=30)[:60], *[0.99] * 40]
START = [{"rollout": 0, "eval/mean": 0.35}]
#: A sign, curves, and the step at which it begins; None where it is absent.
CASES: list[tuple[str, dict[str, Any], int | None]] = [
    ("reward_fall", {"reward/mean": noisy([*ramp(0.2, 0.4)[:60], *np.linspace(0.3, 0.05, 40)])}, 77),
    ("reward_fall", {"reward/mean": [0.05] * 10 + [0.0] * 90}, 11),  # died at once
    ("reward_fall", {"reward/mean": noisy(ramp(0.15, 0.4))}, None),
    ("reward_fall", {"reward/mean": noisy(FLAT, 0.1)}, None),  # noise has a peak too
    ("reward_fall", {"reward/mean": [0.0] * LENGTH}, None),  # nothing to fall from
    # bins jump by as much as the last one is low
    ("reward_fall", {"reward/mean": [*([0.1, 0.9] * 5 + [0.1] * 10) * 4, *[0.2] * 20]}, None),
    # 0.25 x the level of the first half, 0.307
    ("entropy_floor", {"tokens/entropy": ramp(0.4, 0.02)}, 86),
    ("entropy_floor", {"tokens/entropy": ramp(0.4, 0.15)}, None),
    ("entropy_floor", {"tokens/entropy": [0.015] * LENGTH}, 1),
    ("entropy_blow_up", {"tokens/entropy": ramp(0.4, 1.0, start=50)}, 71),
    ("entropy_blow_up", {"tokens/entropy": ramp(0.4, 0.5)}, None),
    ("gradient_spikes", SPIKES, 45),
    ("gradient_spikes", norms([31.5 if place == 44 else 0.5 for place in range(LENGTH)]), None),  # one, without harm
    ("gradient_spikes", HEAVY, None),
    ("gradient_spikes", norms(ramp(0.5, 2.5)), None),
    ("gradient_spikes", norms([0.5] * 30 + [0.001] * 70), None),  # ordinary norms before the gradient vanished
    ("zero_std_groups", {"reward/zero_std_groups": EQUAL, "reward/mean": ramp(0.2, 0.0)}, 61),
    ("zero_std_groups", {"reward/zero_std_groups": EQUAL, "reward/mean": ramp(0.2, 0.99, start=10)}, None),  # solved
    ("zero_std_groups", {"reward/zero_std_groups": FLAT, "reward/mean": FLAT}, None),
    ("truncation", {"response/ended": ramp(1.0, 0.6, start=40)}, 60),
    ("truncation", {"response/ended": [0.7] * LENGTH}, None),  # so from the start
    ("refused_steps", {"optimizer_steps/refused": [2.0 * (place == 33) for place in range(LENGTH)]}, 34),
    ("refused_steps", {"gradient/norm": FLAT}, None),
    ("below_start", {"reward/mean": ramp(0.3, 0.2)}, 6),
    ("below_start", {"reward/mean": FLAT}, None),
    # an evaluation has no flaky grader, so what it is compared with has none either
    ("below_start", {"reward/mean": ramp(0.15, 0.2), "reward/true": ramp(0.3, 0.4), "evaluations": START}, None),
    ("below_start", {"reward/mean": FLAT, "evaluations": START}, 1),
]


LONG = 400


def long(first: float, last: float, start: int = 0, size: float = 0.0) -> list[float]:
    """``first`` up to a step, then straight to ``last``, with noise."""
    values = [first] * start + np.linspace(first, last, LONG - start).tolist()
    return noisy(values, size) if size else values


def every(values: Sequence[float], steps: int = 25) -> list[float]:
    """Only every few steps, as evaluations are."""
    return [value if step % steps == 0 else np.nan for step, value in enumerate(values, 1)]


RISES = long(0.2, 0.7, size=0.02)
#: Rises until step 150, and no longer.
LEVEL = noisy([*np.linspace(0.2, 0.6, 150), *[0.6] * 250], 0.02)
FALLEN = noisy([*np.linspace(0.2, 0.45, 150), *np.linspace(0.45, 0.2, 250)], 0.01)
#: A sign that the report does not count, curves, and between which steps it begins; None where it is absent.
OTHERS: list[tuple[str, dict[str, Any], tuple[int, int] | None]] = [
    ("clipped", {"ratio/clipped": long(0.1, 0.5, 150), "reward/mean": LEVEL}, (150, 260)),
    ("clipped", {"ratio/clipped": [0.5] * LONG, "reward/mean": LEVEL}, None),  # what its objective makes normal
    ("held_out", {"eval/mean": every(FALLEN), "reward/mean": RISES}, (200, 350)),
    ("held_out", {"eval/mean": every(noisy([0.2] * LONG, 0.01)), "reward/mean": RISES}, (50, 300)),
    ("held_out", {"eval/mean": every(RISES), "reward/mean": RISES}, None),
    ("held_out", {"eval/mean": every(long(0.02, 0.12, size=0.005)), "reward/mean": RISES}, None),  # a harder set
    ("held_out", {"eval/mean": every(FALLEN), "reward/mean": FALLEN}, None),  # the reward tells that itself
    ("components", {"reward/acc": FALLEN, "reward/format": long(0.3, 0.9, 100)}, (150, 320)),
    ("components", {"reward/acc": LEVEL, "reward/format": long(0.3, 0.9, 150)}, (120, 180)),
    ("components", {"reward/acc": long(0.01, 0.03), "reward/format": noisy([0.97] * LONG, 0.01)}, (1, 20)),
    ("components", {"reward/acc": RISES, "reward/format": noisy([0.97] * LONG, 0.01)}, None),
    ("components", {"reward/acc": RISES, "reward/brevity_length": long(0.9, 0.3)}, None),  # longer, and right
    ("components", {"reward/acc": LEVEL, "reward/format": LEVEL}, None),
    ("components", {"reward/acc": RISES, "reward/tool": [0.0] * LONG, "reward/format": [0.97] * LONG}, None),
    ("kl_drift", {"kl/value": long(0.02, 4.0, 100)}, (150, 200)),
    ("kl_drift", {"kl/value": [200.0 if step == 77 else 0.1 for step in range(LONG)]}, None),  # one token of one step
    ("difficulty", {"reward/zero_std_groups": long(0.1, 0.8, 100), "reward/mean": LEVEL}, (180, 265)),
    ("difficulty", {"reward/zero_std_groups": [0.75] * LONG, "reward/mean": [0.04] * LONG}, (1, 1)),
    ("difficulty", {"reward/zero_std_groups": [0.7] * LONG, "reward/mean": RISES}, None),  # groups of two
    ("difficulty", {"reward/zero_std_groups": long(0.1, 0.8, 300), "reward/mean": long(0.2, 0.98, 0)}, None),  # solved
    ("difficulty", {"reward/mean": [0.0] * LONG}, (1, 1)),
    ("difficulty", {"reward/mean": long(1.5, 3.0)}, None),  # not a share
    ("difficulty", {"reward/zero_std_groups": [0.7] * LONG, "reward/mean": long(1.5, 3.0)}, None),
    ("plateau", {"reward/mean": LEVEL}, (110, 190)),
    ("plateau", {"reward/mean": RISES}, None),
    ("plateau", {"reward/mean": noisy([0.4] * LONG, 0.02)}, None),  # it never rose
    ("plateau", {"reward/mean": LEVEL, "eval/mean": every(RISES)}, None),
    ("no_gradient", {"gradient/norm": [0.5] * 200 + [0.001] * 200, "reward/mean": LEVEL}, (201, 201)),
    ("no_gradient", {"lr": long(1e-6, 0.0)[:300] + [0.0] * 100, "reward/mean": LEVEL}, (301, 301)),
    ("no_gradient", {"lr": [0.0] * LONG, "reward/mean": RISES}, None),  # a console that rounds
    ("no_gradient", {"advantage/std": [1.0] * 200 + [0.01] * 200}, (201, 201)),
    ("length_without_gain", {"response/length": long(300, 1200, 150), "eval/mean": every(LEVEL)}, (160, 260)),
    ("length_without_gain", {"response/length": long(300, 1200), "eval/mean": every(RISES)}, None),
    (
        "length_without_gain",
        {"response/length": long(300, 1200, 150), "reward/mean": RISES, "reward/acc": LEVEL},
        (160, 260),
    ),
    ("shrunk_steps", {"correction/weight": long(1.0, 0.4)}, (120, 160)),
    ("shrunk_steps", {"correction/weight": noisy([0.97] * LONG, 0.1)}, None),
    ("repetition", {"response/repetition": long(0.02, 0.5, 200)}, (260, 310)),
    ("repetition", {"response/repetition": long(0.02, 0.15)}, None),
]


@pytest.mark.parametrize("bin_width", [1, 10])
def test_the_other_signs_fire_where_their_definition_holds_and_nowhere_else(bin_width: int) -> None:
    assert SIGNS.keys() - COUNTED.keys() - {"sampler_mismatch", "sampler_drift"} == {name for name, *_ in OTHERS}
    for name, shapes, when in OTHERS:
        sign = SIGNS[name].detect(at(shapes, bin_width))
        assert sign.fired is (when is not None), (name, sign)
        if when is not None:
            assert when[0] <= (sign.step or 0) <= when[1] + 10 * (bin_width > 1), (name, sign)


def test_a_live_verdict_is_that_of_the_prefix() -> None:
    shapes = {"reward/mean": LEVEL, "ratio/clipped": long(0.1, 0.5, 150), "kl/value": long(0.02, 4.0, 100)}
    shapes |= {
        "eval/mean": every(FALLEN),
        "response/length": long(300, 1200, 150),
        "tokens/entropy": ramp(0.5, 0.3) * 4,
    }
    watch, announced = Watch("rollout"), list[str]()
    for step in range(1, LONG + 1):
        watch.rows.log(step, {name: values[step - 1] for name, values in shapes.items()})
        if step % 20 == 0 and (found := watch.log(step, {})):
            prefix = {
                sign.name: sign for sign in signs(record({name: values[:step] for name, values in shapes.items()}))
            }
            assert found == [prefix[sign.name] for sign in found]
            announced += [sign.name for sign in found]
    assert len(announced) == len(set(announced)) > 4


def at(shapes: dict[str, Any], bin_width: int, evaluations: Sequence[dict[str, float]] = ()) -> RunRecord:
    """The curves as a folder has them, or as a results file does, in bins of ten."""
    run = record(shapes)
    run.evaluations.extend(evaluations)
    if bin_width == 1:
        return run
    metrics = {name: binned(run, name) for name in shapes}
    return record({}, metrics=metrics, largest=run.largest, bin_width=bin_width, judged=counted_signs(run))


@pytest.mark.parametrize("bin_width", [1, 10])
def test_signs_fire_where_their_definition_holds_and_nowhere_else(bin_width: int) -> None:
    assert COUNTED.keys() == {name for name, *_ in CASES}
    for name, values, when in CASES:
        shapes = {key: curve for key, curve in values.items() if key != "evaluations"}
        sign = COUNTED[name].detect(at(shapes, bin_width, values.get("evaluations", ())))
        assert sign.fired is (when is not None), (name, sign)
        assert sign.step == when, (name, sign)


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
        "far below zero": -2 - 14 * t,
    }[shape]
    noise = np.random.default_rng(seed).uniform(-size, size, length)
    return (rewards + noise).tolist()


FALLS = ("steady", "to a third", "at once", "late", "curved", "negative", "far below zero")
HOLDS = ("flat", "rising", "saturating", "a little", "recovering", "always negative")


@pytest.mark.parametrize("shape", FALLS + HOLDS)
def test_a_reward_that_falls_is_told_from_one_that_is_noisy(shape: str) -> None:
    for length in (30, 40, 200):
        for size in (0.0, 0.02, 0.08):
            for seed in range(2):
                rewards = falling(shape, length, size, seed)
                sign = reward_fall.detect(record({"reward/mean": rewards}))
                assert sign.fired is (shape in FALLS), (length, size, seed, sign)
                assert sign.harm is (shape in FALLS)
