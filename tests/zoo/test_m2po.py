"""M2PO: the fewest tokens go, and what stays fits the budget."""

from __future__ import annotations

import math

import pytest
import torch

from rlstab import M2PO, compose, make_plan
from rlstab.config import load_run
from rlstab.explain.notes import idle_in_run
from tests.core.steps import batch_of, random_rows, run_parts, token
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


def test_only_moves_the_way_of_the_advantage_count_and_go() -> None:
    rows = [moved(-5.0, 0.1, 0.6), moved(5.0, -0.2, -0.3, A=-1.0), moved(9.0, -9.0, A=0.0)]
    # squares 0.01 and 0.36, 0.04 and 0.09: mean 0.125, then 0.047, then 0.025
    assert coefficients(M2PO(), rows) == pytest.approx([1, 1, 0, -1, -1, 0, 0, 0])


def test_dropped_tokens_stay_in_the_divisor() -> None:
    batch = batch_of([moved(0.1, 0.2, 0.6)])
    plan = make_plan(compose(M2PO()), [batch])
    assert plan.terms(batch).keep is None
    assert (plan.kept.tokens, plan.live_tokens) == (3, 2)


def test_the_old_policy_has_no_say() -> None:
    """Against old log-probs that were recomputed for this rollout no token would have moved."""
    for lag in (0.0, 0.4, -0.4):
        rows = [[token(lag=lag, sampled=-gap - lag) for gap in (0.1, 0.2, 0.6)]]
        assert [one == 0 for one in coefficients(M2PO(), rows)] == [False, False, True]


def test_the_budget_is_of_the_whole_step() -> None:
    rows = [moved(0.1, 0.2), moved(0.6), moved(0.1, 0.3)]
    # alone, the second would keep its token, and the third lose one; together only 0.36 goes: mean 0.0375 of the rest
    whole = {"m2po/dropped": 1 / 5, "m2po/harmful": 1.0, "m2po/threshold": 0.36}
    for parts in ([[0, 1, 2]], [[0], [1], [2]], [[2], [], [1, 0]]):
        _, report = run_parts(compose(M2PO()), rows, parts)
        for name, value in whole.items():
            assert report[name].value == pytest.approx(value, rel=1e-13), name


def test_what_is_left_fits_and_one_more_would_not() -> None:
    for seed in range(5):
        batch = batch_of(random_rows(seed, [7, 9, 12]))
        terms = make_plan(compose(M2PO(budget=0.05)), [batch]).terms(batch)
        assert terms.weight is not None
        d = batch.logprobs - batch.signal("rollout_logprobs")
        square, harmful = d.square(), batch.advantages * d > 0
        stays, gone = square[harmful & (terms.weight == 1)], square[terms.weight == 0]
        assert gone.numel()
        assert stays.max() < gone.min()
        assert stays.mean() <= 0.05 < torch.cat([stays, gone.min()[None]]).mean()
        assert bool((terms.weight[~harmful] == 1).all())


@pytest.mark.parametrize("epochs", [1, 2])
def test_left_to_itself_a_run_lets_it_act(epochs: int) -> None:
    run = load_run({"objective": ["clip_higher", "m2po"], "optimisation": {"epochs": epochs}})
    assert run.optimisation.old_logprobs == "recompute"
    assert not any(one.startswith("m2po") for one in idle_in_run(run.composition, run))
    idle = load_run({"objective": ["m2po"], "optimisation": {"old_logprobs": "rollout"}})
    assert any(one.startswith("m2po cannot act") for one in idle_in_run(idle.composition, idle))


def test_moves_of_fifty_nats_are_finite() -> None:
    far = [[token(now=-60.0, drift=drift, sampled=sampled) for drift in (50.0, -50.0) for sampled in (50.0, -50.0)]]
    assert all(math.isfinite(one) for one in coefficients(M2PO(), far))
