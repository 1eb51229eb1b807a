"""The published variants of one correction, by the settings that its card gives them."""

from __future__ import annotations

import math

import pytest
import torch

from rlstab import ImportanceCorrection, SequenceMean, TokenObjective, compose, make_plan
from rlstab.core.terms import Terms
from tests.core.steps import batch_of, gradients, live_of, token

#: Ratios of the old policy over the sampler in three responses: near, far off in one token, and off by a factor of 3.
RATIOS = [[1.0, 0.9995, 1.001], [8.0, 0.4, 1.0], [2.0, 3.0, 0.5]]


def rows(ratios: list[list[float]], **fields: float) -> list[list[dict[str, float]]]:
    return [[token(sampled=-math.log(one), **fields) for one in row] for row in ratios]


def terms(*methods: TokenObjective, ratios: list[list[float]] = RATIOS) -> Terms:
    batch = batch_of(rows(ratios))
    return make_plan(compose(*methods), [batch]).terms(batch)


VARIANTS = {
    "TIS": (ImportanceCorrection(), [1, 0.9995, 1.001, 2, 0.4, 1, 2, 2, 0.5]),
    "TIS, sequence": (
        ImportanceCorrection(level="sequence", max_weight=8.0),
        [1.0004995] * 3 + [3.2] * 3 + [3.0] * 3,
    ),
    "truncated on both sides": (
        ImportanceCorrection(min_weight=0.5, max_weight=5.0),
        [1, 0.9995, 1.001, 5, 0.5, 1, 2, 3, 0.5],
    ),
    "IcePop": (
        ImportanceCorrection(max_weight=None, keep_low=0.45, keep_high=5.0),
        [1, 0.9995, 1.001, 0, 0, 1, 2, 3, 0.5],
    ),
    "masked, sequence": (
        ImportanceCorrection(level="sequence", max_weight=None, keep_high=3.1),
        [1.0004995] * 3 + [0] * 3 + [3.0] * 3,
    ),
    "geometric": (
        ImportanceCorrection(level="geometric", min_weight=1.0, max_weight=1.0, keep_low=0.999, keep_high=1.001),
        [1] * 3 + [0] * 6,
    ),
    "veto": (
        ImportanceCorrection(max_weight=None, veto=0.45),
        [1, 0.9995, 1.001, 0, 0, 0, 2, 3, 0.5],
    ),
}


@pytest.mark.parametrize(("method", "weights"), VARIANTS.values(), ids=VARIANTS)
def test_weights_of_the_published_variants(method: ImportanceCorrection, weights: list[float]) -> None:
    found = terms(method).weight
    assert found is not None
    assert found.tolist() == pytest.approx(weights)


def test_geometric_rejection_beside_token_weights() -> None:
    reject, weigh = VARIANTS["geometric"][0], ImportanceCorrection(max_weight=None)
    found = terms(reject, weigh).weight
    assert found is not None
    assert found.tolist() == pytest.approx([*RATIOS[0], 0, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_the_gradient_of_a_token_is_its_weight_times_the_plain_one(denominator: str) -> None:
    """``c_t = w r A`` over the divisor, for advantages of both signs and ratios on both sides of 1."""
    method = ImportanceCorrection(max_weight=None, keep_low=0.45, keep_high=5.0, denominator=denominator)
    given = rows(RATIOS)
    for place, row in enumerate(given):
        for one in row:
            one["A"], one["logp"] = (1.0, -2.0, 0.5)[place], one["logp"] + (0.3, -0.4, 0.1)[place]
    batch = batch_of(given)
    policy, leaves = live_of(batch, given)
    compose(method)(batch, policy).loss.backward()
    weights = [1, 0.9995, 1.001, 0, 0, 1, 2, 3, 0.5]
    divisor = 9 if denominator == "all" else 7
    flat = [(one["A"], math.exp(one["logp"] - one["old"])) for row in given for one in row]
    expected = [-w * r * A / divisor for w, (A, r) in zip(weights, flat, strict=True)]
    assert gradients(batch, leaves)["logp"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_a_normalised_weight_is_1_on_average_over_what_the_divisor_counts(denominator: str) -> None:
    ratios = [[8.0, 0.4], [1.2], [2.0, 3.0, 0.5, 1.1]]
    token_level = ImportanceCorrection(max_weight=2.5, keep_high=5.0, normalize=True, denominator=denominator)
    found = terms(token_level, ratios=ratios)
    kept = torch.ones(7, dtype=torch.bool) if found.keep is None else found.keep
    assert found.weight[kept].mean().item() == pytest.approx(1.0)

    sequence_level = ImportanceCorrection(level="sequence", keep_high=3.25, normalize=True, denominator=denominator)
    first_of_each = terms(sequence_level, ratios=ratios).weight[[0, 2, 3]]  # of 3.2, 1.2 and 3.3, truncated at 2
    mean = (2.0 + 1.2) / (2 if denominator == "kept" else 3)
    assert first_of_each.tolist() == pytest.approx([2.0 / mean, 1.2 / mean, 0.0])


def test_nothing_left_to_normalise_by() -> None:
    method = ImportanceCorrection(keep_high=0.1, max_weight=None, normalize=True)
    assert terms(method).weight.tolist() == [0.0] * 9


def test_log_ratios_beyond_what_exp_can_hold() -> None:
    given = [[token(now=-60.0, sampled=shift) for shift in (50.0, -50.0, 800.0, -800.0)]]
    for level in ("token", "sequence", "geometric"):
        batch = batch_of(given, dtype=torch.float32)
        method = ImportanceCorrection(level=level, max_weight=None, normalize=True)
        found = make_plan(compose(method, SequenceMean()), [batch]).terms(batch)
        assert found.weight.isfinite().all()
        assert found.weight.double().mean().item() == pytest.approx(1.0)
