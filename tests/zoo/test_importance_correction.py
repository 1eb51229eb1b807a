"""The published variants of one correction, by the settings that its card gives them."""

from __future__ import annotations

import math

import pytest
import torch

from rlstab import ImportanceCorrection, TokenObjective, compose, make_plan
from rlstab.core.terms import Terms
from tests.core.steps import batch_of, token

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
