"""A second round of measuring, and statistics by group: exact, whatever the cut."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstab import KLCov, compose, make_plan
from rlstab.core.comm import LocalComm
from rlstab.core.stats import Grouped, settle
from rlstab.testing.run import joined, run_ranks, run_whole
from rlstab.testing.steps import make_step
from tests.core.methods import PassRate
from tests.core.steps import batch_of, random_rows, run_parts


def test_the_second_round_sees_the_first_over_the_whole_step():
    """The threshold by numpy, from all tokens; each part alone would give another one."""
    method, rows = KLCov(share=0.25), random_rows(3, [6, 9, 4, 8])
    tokens = [own for row in rows for own in row]
    A, now = (np.array([own[field] for own in tokens]) for field in ("A", "now"))
    covariances = (A - A.mean()) * (now - now.mean())
    expected = np.sort(covariances)[-(len(tokens) // 4)]
    for parts in ([[0, 1, 2, 3]], [[0], [1, 3], [], [2]]):
        plan, report = run_parts(compose(method), rows, parts)
        assert report["kl_cov/threshold"].value == pytest.approx(expected, rel=1e-13)
        assert plan.penalised == len(tokens) // 4
    alone = make_plan(compose(method), [batch_of(rows[:2])])
    value = alone.part(0).settled.member("kl_cov").threshold("covariance").value
    assert value != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "ranks",
    [[[[0, 3], [1]], [[2, 4, 5]]], [[[5], [4]], [], [[0, 1, 2, 3]]], [[[0, 2, 4], []], [[1, 3, 5]], [[]]]],
    ids=["two", "three, one without parts", "three, one without tokens"],
)
def test_a_group_that_lies_on_several_ranks_is_one_group(ranks):
    step = make_step("mixed", [3, 5, 2, 4, 1, 6], 2, 7, ())
    rewarded = torch.zeros(6).index_put((step.sequence,), step.evidence["advantages"].float()) > 0
    rates = rewarded.double().view(3, 2).mean(1)[step.sequence // 2]
    assert len(rates.unique()) > 1
    whole, cut = run_whole(PassRate(), step), joined(run_ranks(PassRate(), step, ranks))
    for outcome in (whole, cut):
        assert outcome.report["rate"].value == pytest.approx(rates.mean().item(), rel=1e-14)
    plain = run_whole(compose(), step).gradients["logprobs"]
    torch.testing.assert_close(whole.gradients["logprobs"], (2 - rates) * plain, rtol=1e-14, atol=0)
    torch.testing.assert_close(cut.gradients["logprobs"], whole.gradients["logprobs"], rtol=1e-14, atol=0)


FAR = [-(2**63), -(2**53) - 1, -(2**53), -1, 0, 2**32 - 1, 2**32, 2**53, 2**53 + 1, 2**63 - 1]


class Through:
    """A group of two ranks that hold the same: sums double, and what is gathered stands twice."""

    def sum(self, values):
        return 2 * values

    def gather(self, values):
        assert values.dtype == torch.float64  # what a process group of floats can carry
        return torch.cat([values, values])


def test_keys_of_64_bits_survive_the_way_over_ranks():
    keys = torch.tensor(FAR)
    grouped = Grouped.of(keys, torch.arange(len(FAR)))
    settled = settle([{"x": grouped}], Through()).grouped("x")
    assert settled.keys.tolist() == sorted(FAR)
    assert settled.mean(keys).tolist() == list(range(len(FAR)))
    assert settled.count(keys).tolist() == [2.0] * len(FAR)
    assert settled.total(keys).tolist() == [2.0 * place for place in range(len(FAR))]


def test_an_unknown_key_has_nothing():
    asked = torch.tensor([4, 5, -(2**63)])
    known = Grouped.of(torch.tensor([5, -3, 5]), torch.tensor([1.0, 2.0, 4.0]))
    assert (known.count(asked).tolist(), known.total(asked).tolist()) == ([0, 2, 0], [0, 5, 0])
    assert known.mean(asked)[[0, 2]].isnan().all()
    nothing = Grouped.of(torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert nothing.count(asked).tolist() == nothing.total(asked).tolist() == [0.0] * 3
    assert nothing.mean(asked).isnan().all()


def test_values_are_summed_where_they_are_asked_to_be():
    keys, values = torch.tensor([1, 2, 1]), torch.tensor([0.5, math.nan, 2.0], requires_grad=True)
    some = Grouped.of(keys, values, torch.tensor([True, False, True]))
    assert (some.keys.tolist(), some.totals.tolist(), some.counts.tolist()) == ([1], [2.5], [2.0])
    assert not some.totals.requires_grad
    marked = Grouped.of(keys.int(), torch.tensor([True, False, True]))
    assert (marked.keys.dtype, marked.mean(keys).tolist()) == (torch.int64, [1.0, 0.0, 1.0])


few = st.lists(st.tuples(st.sampled_from([-7, 0, 3, 2**60]), st.integers(-64, 64)), max_size=9)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(few, few, few)
def test_it_is_a_commutative_monoid(first, other, third):
    def grouped(pairs):
        keys, values = torch.tensor([key for key, _ in pairs]).long(), torch.tensor([value for _, value in pairs])
        return Grouped.of(keys, values)

    def columns(merged):
        return [values.tolist() for values in (merged.keys, merged.totals, merged.counts)]

    a, b, c = map(grouped, (first, other, third))
    expected = columns(grouped(first + other + third))  # whole numbers: sums are exact
    for merged in (
        a.merge(b).merge(c),
        a.merge(b.merge(c)),
        c.merge(a).merge(b),
        a.merge(grouped([])).merge(c).merge(b),
    ):
        assert columns(merged) == expected
    assert columns(settle([{"x": a}, {"x": b}, {"x": c}], LocalComm()).grouped("x")) == expected
