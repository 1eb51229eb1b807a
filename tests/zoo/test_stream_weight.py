"""Two streams: their means, their empty cases, and what is counted."""

from __future__ import annotations

import pytest
import torch

from rlstab import ClipHigher, PolicyOutputs, RandomMask, StreamWeight, TokenBatch, compose, make_plan, within
from tests.core.steps import batch_of, gradients, live_of, random_rows
from tests.zoo.pulls import pulls

ROWS = random_rows(5, [4, 6, 2, 5, 3, 7])


def apart(rows, branch):
    return [row for row in rows if row and bool(row[0]["branch"]) == branch]


def run(rows, *methods):
    batch = batch_of(rows)
    policy, leaves = live_of(batch, rows)
    out = compose(*methods)(batch, policy)
    out.loss.backward()
    return out.loss.item(), gradients(batch, leaves)["logp"].tolist(), out.metrics()


@pytest.mark.parametrize("coefficient", [0.0, 0.3, 1.0])
def test_the_loss_is_the_sum_of_two_means(coefficient: float) -> None:
    """Each of a step that has nothing but the one stream."""
    loss, slopes, metrics = run(ROWS, StreamWeight(coefficient=coefficient), ClipHigher())
    (main, of_main, _), (other, of_other, _) = (run(apart(ROWS, branch), ClipHigher()) for branch in (False, True))
    assert loss == pytest.approx(main + coefficient * other, rel=1e-14)
    marks = [bool(one["branch"]) for row in ROWS for one in row]
    expected = {False: iter(of_main), True: iter(of_other)}
    scale = {False: 1.0, True: coefficient}
    assert slopes == pytest.approx([scale[one] * next(expected[one]) for one in marks], rel=1e-14)
    assert metrics["stream_weight/branches"] == sum(marks) / len(marks)
    assert metrics["stream_weight/weight"] == pytest.approx(1 + coefficient)


@pytest.mark.parametrize(("branch", "expected"), [(0.0, 1.0), (1.0, 0.3)])
def test_one_stream_alone_is_one_mean(branch: float, expected: float) -> None:
    found = pulls(StreamWeight(coefficient=0.3), ratios=[[1.0, 1.0]], advantages=[1.0], branch=branch)
    assert found.tolist() == [[expected, expected]]


def test_no_tokens() -> None:
    empty = torch.zeros(0, 3, dtype=torch.float64)
    batch = TokenBatch.from_padded(response_mask=empty, advantages=empty[:, 0], old_logprobs=empty, branch=empty)
    out = compose(StreamWeight())(batch, PolicyOutputs.from_padded(batch, logprobs=empty.clone().requires_grad_()))
    assert out.loss.item() == 0
    assert "stream_weight/weight" not in out.metrics()


def test_both_counts_are_those_of_the_whole_optimizer_step() -> None:
    """A part with branches alone, and one with answers from the prompt alone."""
    objective = compose(StreamWeight(coefficient=0.5))
    parts = [batch_of(apart(ROWS, branch)) for branch in (False, True)]
    plan = make_plan(objective, parts)
    main, other = (len(one) for one in parts)
    assert plan.terms(parts[0]).weight.tolist() == pytest.approx([(main + other) / main] * main)
    assert plan.terms(parts[1]).weight.tolist() == pytest.approx([0.5 * (main + other) / other] * other)


def test_inside_a_mask_the_means_are_those_of_what_is_kept() -> None:
    mask = RandomMask(share=0.5, sign="all")
    batch = batch_of(ROWS, ids=range(len(ROWS)))
    kept = compose(mask)
    keep = make_plan(kept, [batch]).terms(batch).keep
    branch = batch.signal("branch") > 0
    assert 0 < (keep & branch).sum() < branch.sum()

    def streams(objective):
        terms = make_plan(objective, [batch]).terms(batch)
        share = terms.weight * keep / keep.sum()
        return share[~branch].sum().item(), share[branch].sum().item()

    assert streams(compose(within(mask, StreamWeight(coefficient=0.3)))) == pytest.approx((1.0, 0.3), rel=1e-14)
    assert streams(compose(mask, StreamWeight(coefficient=0.3))) != pytest.approx((1.0, 0.3), rel=0.01)
