import numpy as np
import pytest

from rlstab.report import collapse
from rlstab.report.collapse import DEFINITIONS, DETECTORS, TITLES, collapsed, detect
from tests.report.conftest import record

STEPS = 100
FLAT = [0.3] * STEPS


def noisy(values: list[float], size: float = 0.03) -> list[float]:
    return (np.array(values) + size * np.random.default_rng(1).normal(size=len(values))).tolist()


def ramp(first: float, last: float, start: int = 0) -> list[float]:
    """``first`` up to a rollout, then straight to ``last``."""
    return [first] * start + np.linspace(first, last, STEPS - start).tolist()


def test_every_detector_has_a_definition_and_a_title() -> None:
    assert DEFINITIONS.keys() == DETECTORS.keys() == TITLES.keys()
    assert [one.detector for one in detect(record({"reward/mean": FLAT}))] == list(DETECTORS)


def test_a_reward_that_falls() -> None:
    run = record({"reward/mean": noisy([*ramp(0.2, 0.4)[:60], *np.linspace(0.3, 0.05, 40)])})
    found = collapse.reward_fall(run)
    assert found.fired is True
    assert 70 <= found.rollout <= 90
    assert found.value < 0.5
    assert collapsed(run)


@pytest.mark.parametrize(
    "values",
    [
        noisy(ramp(0.15, 0.4)),  # rises
        noisy(FLAT, 0.1),  # noise has a peak too
        [0.0] * STEPS,  # nothing to fall from
        [*([0.1, 0.9] * 5 + [0.1] * 10) * 4, *[0.2] * 20],  # bins jump by as much as the last one is low
    ],
)
def test_a_reward_that_does_not_fall(values: list[float]) -> None:
    run = record({"reward/mean": values})
    found = collapse.reward_fall(run)
    assert (found.fired, found.rollout) == (False, None)
    assert not collapsed(run)


def test_a_run_that_dies_at_once_has_fallen() -> None:
    assert collapse.reward_fall(record({"reward/mean": [0.05] * 10 + [0.0] * 90})).fired is True


def test_entropy_floor() -> None:
    falls = collapse.entropy_floor(record({"tokens/entropy": ramp(0.4, 0.02)}))
    assert falls.fired is True
    # 0.25 x the mean of the first ten, 0.383, is passed on the way to 0.02 about rollout 80
    assert falls.rollout == 90
    holds = collapse.entropy_floor(record({"tokens/entropy": ramp(0.4, 0.15)}))
    assert (holds.fired, holds.rollout) == (False, None)
    low_at_once = collapse.entropy_floor(record({"tokens/entropy": [0.015] * STEPS}))
    assert (low_at_once.fired, low_at_once.rollout) == (True, 10)


def test_entropy_blow_up() -> None:
    rises = collapse.entropy_blow_up(record({"tokens/entropy": ramp(0.4, 1.0, start=50)}))
    assert rises.fired is True
    assert 60 <= rises.rollout <= 80
    assert collapse.entropy_blow_up(record({"tokens/entropy": ramp(0.4, 0.5)})).fired is False


def norms(values: list[float]) -> dict[str, list[float]]:
    return {"gradient/norm": values, "gradient/largest_norm": values}


def test_gradient_spikes() -> None:
    values = [0.5] * STEPS
    values[44] = 31.5
    found = collapse.gradient_spikes(record(norms(values)))
    assert (found.fired, found.rollout) == (True, 50)
    assert found.value == pytest.approx(63)
    assert "1 of 10" in found.text


@pytest.mark.parametrize("values", [[0.5] * STEPS, ramp(0.5, 2.5), [0.5] * 30 + [0.001] * 70])
def test_ordinary_norms_before_a_gradient_vanishes_are_no_spikes(values: list[float]) -> None:
    assert collapse.gradient_spikes(record(norms(values))).fired is False


def test_zero_variance_groups_are_told_from_solved_ones() -> None:
    equal = ramp(0.5, 1.0, start=30)
    equal[60:] = [0.99] * 40
    found = collapse.zero_std_groups(record({"reward/zero_std_groups": equal, "reward/mean": ramp(0.2, 0.0)}))
    assert (found.fired, found.rollout) == (True, 70)
    solved = collapse.zero_std_groups(
        record({"reward/zero_std_groups": equal, "reward/mean": ramp(0.2, 0.99, start=10)})
    )
    assert solved.fired is False
    assert (
        "solved"
        in collapse.zero_std_groups(record({"reward/zero_std_groups": equal, "reward/mean": [0.98] * STEPS})).text
    )
    assert collapse.zero_std_groups(record({"reward/zero_std_groups": FLAT, "reward/mean": FLAT})).fired is False


def test_truncation() -> None:
    found = collapse.truncation(record({"response/ended": ramp(1.0, 0.6, start=40)}))
    assert found.fired is True
    assert 60 <= found.rollout <= 80
    assert collapse.truncation(record({"response/ended": [0.7] * STEPS})).fired is False  # so from the start
    assert collapse.truncation(record({"response/ended": [0.95] * STEPS})).fired is False


def test_refused_steps_are_counted() -> None:
    refused = [0.0] * STEPS
    refused[33], refused[95] = 2.0, 1.0
    found = collapse.refused_steps(record({"optimizer_steps/refused": refused}))
    assert (found.fired, found.rollout, found.value) == (True, 40, 3)
    assert collapse.refused_steps(record({"reward/mean": FLAT})).fired is False


def test_ending_below_the_start_reads_the_evaluation_before_any_step() -> None:
    start = [{"rollout": 0, "eval/mean": 0.35}]
    assert collapse.below_start(record({"reward/mean": FLAT}, evaluations=start)).fired is True
    assert collapse.below_start(record({"reward/mean": FLAT})).fired is False
    assert collapse.below_start(record({"reward/mean": ramp(0.3, 0.2)})).fired is True
    assert collapse.below_start(record({"reward/mean": ramp(0.3, 0.4)}, evaluations=start)).fired is False
    flaky = {"reward/mean": ramp(0.15, 0.2), "reward/true": ramp(0.3, 0.4)}  # an evaluation loses no scores
    assert collapse.below_start(record(flaky, evaluations=start)).fired is False


def test_short_runs_and_missing_metrics_are_not_judged() -> None:
    short = record({name: [0.1] * 20 for name in ("reward/mean", "tokens/entropy")})
    judged = {one.detector: one for one in detect(short)}
    assert judged["reward_fall"].fired is None
    assert "too short: 2 tens" in judged["reward_fall"].text
    assert judged["truncation"].text == "response/ended is missing"


def test_a_run_that_failed_over_nan_has_collapsed_and_one_without_memory_has_not() -> None:
    values = {"reward/mean": noisy(ramp(0.2, 0.4))}
    assert collapsed(record(values, status="failed", error="rlstab.errors.NonFinite: 20 optimizer steps"))
    assert not collapsed(record(values, status="failed", error="torch.OutOfMemoryError"))
