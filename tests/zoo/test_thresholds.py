"""Which side of its threshold a token is on, where that is decided by a sign, by rounding or by a count of one."""

import math

import pytest
import torch

from rlstab import LpReg, S2TMask, TokenBatch, compose, make_plan


def terms(method, *, advantages=None, **signals):
    some = next(iter(signals.values()))
    given = {"advantages": torch.full((1,), 1.0) if advantages is None else advantages} | signals
    batch = TokenBatch.from_padded(response_mask=torch.ones_like(some), **given)
    return make_plan(compose(method), [batch]).terms(batch)


def test_candidates_of_s2t_are_rewarded_however_little():
    now = torch.full((1, 5), -9.0)
    found = terms(
        S2TMask(quantile=1.0),
        advantages=torch.tensor([[-1.0, -0.5, 0.0, 0.5, 1.0]]),
        old_logprobs=now,
        entropies=torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.2]]),
    )
    assert found.keep.tolist() == [True, True, True, False, True]
    assert found.report["s2t/candidates"].value == 2 / 5


def test_candidates_of_s2t_are_compared_in_float64():
    sides = set()
    for max_prob in (0.001, 0.002, 0.007, 0.013):
        logprob = torch.tensor([[math.log(max_prob)]])  # rounded to float32, up or down
        below = logprob.item() < math.log(max_prob)
        found = terms(S2TMask(max_prob=max_prob), old_logprobs=logprob, entropies=torch.zeros(1, 1))
        assert found.report["s2t/candidates"].value == float(below)
        sides.add(below)
    assert sides == {True, False}


@pytest.mark.parametrize(("share", "selected"), [(0.5, [True, True, False, False]), (0.3, [False] * 4)])
def test_code_form_of_lp_reg_takes_the_floor_of_the_punished_and_never_one(share, selected):
    now = torch.tensor([[-4.0, -3.0, -2.0, -1.0, -9.0]])
    found = terms(
        LpReg(form="code", share=share),
        advantages=torch.tensor([[-0.5, -0.5, -0.5, -0.5, 0.0]]),
        old_logprobs=now,
        max_logprobs=now,
        log_kept_mass=torch.zeros(1, 5),
    )
    assert found.unclipped.tolist() == [*selected, False]


def test_paper_form_of_lp_reg_may_take_one():
    now = torch.tensor([[-4.0, -3.0, -2.0, -1.0, -9.0]])
    advantages = torch.tensor([[-0.5, -0.5, -0.5, -0.5, 0.5]])
    for share, selected in ((0.2, []), (0.4, [0]), (0.5, [0, 1])):
        method = LpReg(share=share)
        found = terms(method, advantages=advantages, old_logprobs=now, max_logprobs=now)
        assert found.penalties["lp_reg"].where.nonzero().flatten().tolist() == selected
