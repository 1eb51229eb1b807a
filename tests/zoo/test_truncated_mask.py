"""A response that was cut off is as if it had not been sampled, but for the penalties and the divisor that count it."""

from __future__ import annotations

import math

import pytest

from rlstab import ClipHigher, KLPenalty, SequenceMean, TokenMean, TokenObjective, TruncatedMask, compose
from tests.core.steps import batch_of, gradients, live_of, random_rows

ROWS = [row for row in random_rows(8, [4, 6, 2, 5, 3]) if row]
LEFT = [row for row in ROWS if not row[0]["cut"]]


def run(rows: list[list[dict[str, float]]], *methods: TokenObjective) -> tuple[float, list[float]]:
    batch = batch_of(rows)
    policy, leaves = live_of(batch, rows)
    out = compose(*methods)(batch, policy)
    out.loss.backward()
    return out.loss.item(), gradients(batch, leaves)["logp"].tolist()


@pytest.mark.parametrize("aggregate", [TokenMean(), SequenceMean()], ids=repr)
def test_the_step_is_that_of_the_responses_that_ended(aggregate: TokenObjective) -> None:
    assert 0 < len(LEFT) < len(ROWS)
    loss, slopes = run(ROWS, TruncatedMask(), ClipHigher(), aggregate)
    alone, theirs = run(LEFT, ClipHigher(), aggregate)
    assert loss == pytest.approx(alone)
    of = [one["cut"] for row in ROWS for one in row]
    assert [slope for slope, cut in zip(slopes, of, strict=True) if not cut] == pytest.approx(theirs)
    assert not any(slope for slope, cut in zip(slopes, of, strict=True) if cut)


def test_all_tokens_in_the_divisor() -> None:
    loss, _ = run(ROWS, TruncatedMask(denominator="all"))
    alone, _ = run(LEFT)
    assert loss * sum(map(len, ROWS)) == pytest.approx(alone * sum(map(len, LEFT)))


def test_a_penalty_still_reaches_it() -> None:
    rows = [[{**one, "A": 0.0} for one in row] for row in ROWS]
    penalty = KLPenalty(coefficient=0.5, estimator="k1")
    _, slopes = run(rows, TruncatedMask(), penalty)
    assert slopes == pytest.approx([0.5 / math.fsum(map(len, ROWS))] * sum(map(len, ROWS)))
