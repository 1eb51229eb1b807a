"""M2PO: the fewest tokens go, and what stays fits the budget."""

from __future__ import annotations

import pytest

from rlstab import M2PO, compose
from rlstab.config import load_run
from rlstab.explain.notes import idle_in_run
from tests.core.steps import run_parts, token
from tests.zoo.coefficients import coefficients


def moved(*gaps: float, A: float = 1.0) -> list[dict[str, float]]:
    """A response whose tokens are so many nats above what the sampler reported; their ratio is 1."""
    return [token(sampled=-gap, A=A) for gap in gaps]


@pytest.mark.parametrize(
    ("gaps", "dropped"),
    [
        ((0.1, 0.2, 0.6), [2]),  # squares 0.01, 0.04, 0.36: mean 0.137, then 0.025
        ((0.1, 0.1, 0.3), []),  # mean 0.037
        ((0.1, 0.3, 0.6), [1, 2]),  # mean 0.153, 0.05, 0.01
        ((0.5,), []),  # the smallest stays
        ((0.5, 0.6), [1]),
        ((0.5, 0.5, 0.5, 0.7, 0.7), [3, 4]),  # equal values go, and stay, together
    ],
)
def test_the_largest_go_until_the_mean_fits(gaps: tuple[float, ...], dropped: list[int]) -> None:
    expected = [0.0 if place in dropped else 1.0 for place in range(len(gaps))]
    assert coefficients(M2PO(), [moved(*gaps)]) == pytest.approx(expected)
    punished = moved(*(-gap for gap in gaps), A=-1.0)
    assert coefficients(M2PO(), [punished]) == pytest.approx([-one for one in expected])


def test_the_budget_is_of_the_whole_step() -> None:
    rows = [moved(0.1, 0.2), moved(0.6), moved(0.1, 0.3)]
    # alone, the second would keep its token, and the third lose one; together only 0.36 goes: mean 0.0375 of the rest
    whole = {"m2po/dropped": 1 / 5, "m2po/harmful": 1.0, "m2po/threshold": 0.36}
    for parts in ([[0, 1, 2]], [[0], [1], [2]], [[2], [], [1, 0]]):
        _, report = run_parts(compose(M2PO()), rows, parts)
        for name, value in whole.items():
            assert report[name].value == pytest.approx(value, rel=1e-13), name


@pytest.mark.parametrize("epochs", [1, 2])
def test_left_to_itself_a_run_lets_it_act(epochs: int) -> None:
    run = load_run({"objective": ["clip_higher", "m2po"], "optimisation": {"epochs": epochs}})
    assert run.optimisation.old_logprobs == "recompute"
    assert not any(one.startswith("m2po") for one in idle_in_run(run.composition, run))
    idle = load_run({"objective": ["m2po"], "optimisation": {"old_logprobs": "rollout"}})
    assert any(one.startswith("m2po cannot act") for one in idle_in_run(idle.composition, idle))
