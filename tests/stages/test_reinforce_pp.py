"""REINFORCE++: whitened over tokens, against a list with every token in it."""

from __future__ import annotations

import statistics

import pytest

from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.stages.dr_grpo import DrGRPO
from rlstab.stages.reinforce_pp import ReinforcePP
from tests.stages.estimating import advantages, batch, by_group, drawn


def tokens(values: list[float], lengths: list[float]) -> list[float]:
    return [one for one, length in zip(values, lengths, strict=True) for _ in range(int(length))]


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_every_advantage_by_hand(seed: int, baseline: bool) -> None:
    whole = drawn(seed, graded=True)
    values = whole.rewards.tolist()
    if baseline:
        for places in by_group(whole):
            mean = sum(float(whole.rewards[one]) for one in places) / len(places)
            for one in places:
                values[one] -= mean
    every = tokens(values, whole.lengths.tolist())
    scale = (statistics.variance(every) + 1e-8) ** 0.5
    expected = [(one - statistics.fmean(every)) / scale for one in values]
    (found,) = advantages(ReinforcePP(baseline=baseline), whole)
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_over_tokens_the_mean_is_0_and_the_variance_1() -> None:
    whole = drawn(3)
    every = tokens(advantages(ReinforcePP(epsilon=1e-300), whole)[0].tolist(), whole.lengths.tolist())
    assert statistics.fmean(every) == pytest.approx(0, abs=1e-12)
    assert statistics.variance(every) == pytest.approx(1)


def test_of_equal_lengths_the_variant_is_dr_grpo_over_one_number() -> None:
    same = batch([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], [0, 0, 0, 1, 1, 1], [5.0] * 6)
    ratio = advantages(ReinforcePP(baseline=True), same)[0] / advantages(DrGRPO(), same)[0]
    assert ratio.tolist() == pytest.approx([float(ratio[0])] * 6)


def test_an_even_group_is_compared_with_the_rest_of_the_rollout() -> None:
    mixed = batch([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], [1.0, 1.0, 1.0, 3.0])
    assert advantages(ReinforcePP(), mixed)[0][:2].tolist() == pytest.approx([0.4082482904638631] * 2)
    assert bool((advantages(ReinforcePP(baseline=True), mixed)[0][:2] < 0).all())


def test_it_reports_what_it_whitens_by() -> None:
    stage, given = ReinforcePP(), batch([0.0, 1.0], lengths=[1.0, 3.0])
    stat, state = measure_all(stage, [given], {}, LocalComm())
    found = stage.report(given, stat, state)
    assert {name: one.value for name, one in found.items()} == {"mean": 0.75, "deviation": 0.5}
