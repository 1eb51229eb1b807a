"""The teacher's fit: a minimum, found from any shape of examples."""

import math
import statistics

import pytest
import torch

from rlstab.stages.half_sigmoid import HalfSigmoid


def drawn(count, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, width, generator=generator, dtype=torch.float64) * 3 + 1
    return features, torch.rand(count, generator=generator, dtype=torch.float64) / 2


def loss(weights, rows, targets, ridge):
    """Number by number."""
    total = ridge * sum(w * w for w in weights)
    for row, target in zip(rows, targets, strict=True):
        margin = sum(w * x for w, x in zip(weights, row, strict=True))
        total += (0.5 / (1 + math.exp(-margin)) - target) ** 2
    return total


def scaled(features):
    """Centred by column, divided by the deviation and by the root of the width, with a constant."""
    columns = []
    for column in zip(*features.tolist(), strict=True):
        mean, deviation = statistics.fmean(column), statistics.pstdev(column)
        columns.append([(x - mean) / deviation / features.shape[1] ** 0.5 for x in column])
    return [[*row, 1.0] for row in zip(*columns, strict=True)]


@pytest.mark.parametrize(("count", "width"), [(40, 3), (12, 12), (5, 30)])
@pytest.mark.parametrize("ridge", [1e-3, 0.1])
def test_no_small_step_from_it_lowers_the_loss(count, width, ridge):
    features, targets = drawn(count, width)
    teacher = HalfSigmoid.fit(features, targets, ridge)
    rows, weights = scaled(features), teacher.weights.tolist()
    least = loss(weights, rows, targets.tolist(), ridge)
    assert least < loss([0.0] * (width + 1), rows, targets.tolist(), ridge)
    for place in range(width + 1):
        for step in (-1e-3, 1e-3):
            moved = [w + step * (other == place) for other, w in enumerate(weights)]
            assert loss(moved, rows, targets.tolist(), ridge) > least
    expected = [0.5 / (1 + math.exp(-sum(w * x for w, x in zip(weights, row, strict=True)))) for row in rows]
    torch.testing.assert_close(teacher(features), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("targets", [[0.0] * 6, [0.5] * 6, [0.0, 0.5] * 3])
def test_extreme_targets_stay_finite(targets):
    features, _ = drawn(6, 20)
    values = HalfSigmoid.fit(features, torch.tensor(targets, dtype=torch.float64), 1e-6)(features * 100)
    assert values.isfinite().all()
    assert ((values >= 0) & (values <= 0.5)).all()


@pytest.mark.parametrize("features", [torch.zeros(3, 0), torch.ones(3, 2), torch.ones(1, 2)])
def test_features_that_do_not_differ_give_the_mean(features):
    targets = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)[: len(features)]
    values = HalfSigmoid.fit(features.double(), targets, 1e-9)(features.double())
    torch.testing.assert_close(values, torch.full_like(targets, float(targets.mean())), rtol=0, atol=1e-6)
