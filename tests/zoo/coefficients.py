"""The coefficient of each token: ``c`` in gradient = -c times the gradient of its log-prob, before the aggregation."""

from __future__ import annotations

from rlstab import TokenObjective, compose
from tests.core.steps import batch_of, gradients, live_of


def coefficients(
    objective: TokenObjective, rows: list[list[dict[str, float]]], *, live_ratio: bool = False
) -> list[float]:
    """Of all tokens of the rows, as in tests.core.steps, under a mean over tokens."""
    batch = batch_of(rows, live_ratio=live_ratio)
    policy, leaves = live_of(batch, rows)
    compose(objective)(batch, policy).loss.backward()
    return [-len(batch) * slope + 0.0 for slope in gradients(batch, leaves)["logp"].tolist()]
