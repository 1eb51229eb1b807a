"""CPPO: what a token may move depends on its place, and on what its prefix moved."""

from __future__ import annotations

import math

import pytest

from rlstab import CPPO, DPPO
from tests.core.steps import random_rows, token
from tests.zoo.coefficients import coefficients


def response(*moves: float, A: float = 1.0, start: float = 0.5) -> list[dict[str, float]]:
    """Tokens sampled with probability ``start`` that have ``start + move`` now."""
    now = math.log(start)
    return [token(now=now, drift=math.log(start + move) - now, A=A) for move in moves]


def pulls(method: CPPO, *rows: list[dict[str, float]], live_ratio: bool = False) -> list[bool]:
    return [one != 0 for one in coefficients(method, list(rows), live_ratio=live_ratio)]


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        # weights 1, 0.9, 0.8; a budget of 0.04 a token, for the 0.9-quantile is above it
        ((0.12, 0.10, 0.10), [True, False, False]),  # 0.12 <= 0.15, 0.09 > 0.07, 0.08 > 0.016
        ((0.12, 0.07, 0.02), [True, True, True]),  # 0.063 <= 0.07, 0.016 <= 0.043
        ((0.16, 0.01, 0.01), [False, True, True]),  # 0.009 <= 0.03, 0.008 <= 0.057
        ((0.03, 0.16, 0.18), [True, True, False]),  # 0.144 <= 0.15, for the bound is never wider; 0.144 > 0.052
        ((0.30, 0.01, 0.01), [False, False, False]),  # the prefix has overspent
        # weights 1 and 0.8
        ((0.01, 0.18), [True, True]),  # the last token may move 0.15 / 0.8
        ((0.01, 0.19), [True, False]),
        ((0.15 - 1e-9,), [True]),
        ((0.15 + 1e-9,), [False]),
    ],
)
def test_known_gates(moves: tuple[float, ...], expected: list[bool]) -> None:
    assert pulls(CPPO(), response(*moves)) == expected
    assert pulls(CPPO(), response(*(-move for move in moves), A=-1.0)) == expected


def test_the_budget_follows_the_quantile_between_its_bounds() -> None:
    """After a move of 0.14 the second token has 0.01 and the budget of one token: 0.02, the quantile, or 0.04."""
    method = CPPO(min_weight=1.0, quantile=0.0)  # the smallest move
    for smallest, budget in ((0.005, 0.02), (0.03, 0.03), (0.10, 0.04)):
        for over in (-1e-9, 1e-9):
            row = response(0.14, 0.01 + budget + over, smallest, 0.13)
            assert pulls(method, row)[1] is (over < 0)


def test_a_move_against_the_advantage_is_never_stopped_and_spends() -> None:
    alone = response(0.10, 0.05)
    assert pulls(CPPO(), alone) == [True, True]
    against = [{**one, "A": -1.0} for one in response(0.30)]
    assert pulls(CPPO(), against + alone) == [True, False, False]


def test_a_prefix_ends_with_its_response() -> None:
    spent = response(0.30, 0.30)
    assert pulls(CPPO(), spent, response(0.12), spent, response(0.12)) == [False, False, True, False, False, True]


@pytest.mark.parametrize("live_ratio", [False, True])
def test_without_weights_and_budget_it_is_dppo(live_ratio: bool) -> None:
    rows = random_rows(3, [6, 9, 0, 12])
    for anchor in ("rollout", "old"):
        even = CPPO(delta=0.04, min_weight=1.0, min_budget=1e6, anchor=anchor)
        dppo = coefficients(DPPO(high=0.04, low=0.04, anchor=anchor), rows, live_ratio=live_ratio)
        found = pulls(even, *rows, live_ratio=live_ratio)
        assert found == [one != 0 for one in dppo]
        free = pulls(CPPO(delta=1e9), *rows)
        assert (found != free) is (anchor == "rollout" or not live_ratio)


@pytest.mark.parametrize("anchor", ["rollout", "old"])
def test_ratios_of_fifty_nats_are_finite(anchor: str) -> None:
    far = [[token(now=-60.0, drift=drift, A=A) for drift in (50.0, -50.0)] for A in (1.0, -1.0)]
    assert all(math.isfinite(one) for one in coefficients(CPPO(anchor=anchor), far))  # type: ignore[arg-type]


def test_against_the_sampler_it_acts_in_every_run() -> None:
    assert CPPO().reads_drift == frozenset()
    assert CPPO(anchor="old").reads_drift == {"live"}
