"""ASPO: inverse weights, and the room that the entropy of a token gives it."""

from __future__ import annotations

import math

import pytest

from rlstab import ASPO, compose
from tests.core.steps import random_rows, run_parts, token
from tests.zoo.coefficients import coefficients


def beside(ratio: float, A: float, H: float, others: tuple[float, ...]) -> list[list[dict[str, float]]]:
    """A token in a response with others of these entropies, and another response that has the highest of all."""
    rest = [token(H=one, A=A) for one in others]
    return [[token(drift=math.log(ratio), A=A, H=H), *rest], [token(H=9.0)]]


@pytest.mark.parametrize(
    ("ratio", "A", "low", "high"),
    [
        (1.3, 2.0, 0.0, 2 / 1.3),
        (1.5, 2.0, 0.0, 0.0),
        (0.5, 2.0, 4.0, 4.0),
        (0.1, 2.0, 6.0, 6.0),  # 1 / r = 10, held at 3
        (1.3, -2.0, -2.6, -2.6),
        (5.0, -2.0, -6.0, -6.0),  # no end beyond the cap, unlike a dual clip
        (0.7, -2.0, 0.0, -1.4),
        (0.5, -2.0, 0.0, 0.0),
    ],
)
def test_known_coefficients(ratio: float, A: float, low: float, high: float) -> None:
    """Of a token below the quantile of its response, and of the one above it."""
    assert coefficients(ASPO(), beside(ratio, A, 0.1, (0.2, 0.3, 0.4)))[0] == pytest.approx(low)
    assert coefficients(ASPO(), beside(ratio, A, 0.5, (0.2, 0.3, 0.4)))[0] == pytest.approx(high)


def test_a_token_at_the_quantile_has_the_smaller_room() -> None:
    """Of six tokens the 0.8-quantile is the fifth value: only what is above it has more room."""
    others = (0.1, 0.2, 0.3, 0.4, 0.5)
    at, above = (coefficients(ASPO(), beside(1.3, 1.0, H, others))[0] for H in (0.5, 0.6))
    assert at == 0.0
    assert above == pytest.approx(1 / 1.3)
    assert coefficients(ASPO(), beside(1.3, 1.0, 0.5, (0.5,) * 5))[0] == 0.0  # all alike: none is above


def test_the_quantile_is_that_of_the_response_however_the_step_is_cut() -> None:
    rows = [[{**one, "H": 0.1 * place} for place, one in enumerate(row)] for row in random_rows(8, [5, 7, 0, 6])]
    expected = run_parts(compose(ASPO()), rows, [[0, 1, 2, 3]])[1]
    for parts in ([[0], [1], [2], [3]], [[3, 0], [], [2, 1]]):
        _, report = run_parts(compose(ASPO()), rows, parts)
        for name in ("aspo/high_entropy", "ratio/surrogate", "ratio/stopped"):
            assert report[name].value == pytest.approx(expected[name].value, rel=1e-14), name
    assert expected["aspo/high_entropy"].total == 1 + 2 + 1  # above place 3.2, 4.8 and 4.0


def test_ratios_of_fifty_nats_are_finite() -> None:
    far = [[token(now=-60.0, drift=drift, A=A) for drift in (50.0, -50.0)] for A in (1.0, -1.0)]
    assert all(math.isfinite(one) for one in coefficients(ASPO(), far))
