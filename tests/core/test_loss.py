import math
from dataclasses import replace

import pytest
import torch

from rlstab import (
    STARE,
    AdaptiveEntropy,
    ClipHigher,
    ConstantLength,
    EntropyBonus,
    KLPenalty,
    LpReg,
    S2TMask,
    SequenceMean,
    TopEntropyMask,
    compose,
    make_plan,
)
from rlstab.errors import NonFinite
from rlstab.testing.tolerances import REORDERED
from tests.core.methods import DropPunished, Exempt, Noise, Scale, Unweighted
from tests.core.steps import batch_of, gradients, live_of, random_rows, token
from tests.tolerances import assert_near

ROWS = random_rows(11, [3, 5, 0, 7, 4])
PUNISHED = [[token(A=-1.0, drift=0.1, ref=-0.5)] * 3, [token(A=-2.0)]]
AGGREGATES = [(), (SequenceMean(),), (ConstantLength(length=5),)]


def run(objective, rows, **options):
    """The loss, its packed gradients and the batch."""
    batch = batch_of(rows, **options)
    policy, leaves = live_of(batch, rows)
    out = objective(batch, policy, state=objective.init_state())
    out.loss.backward()
    return out, gradients(batch, leaves), batch


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_nothing_kept_is_zero_with_zero_gradient_and_says_so(aggregate):
    out, slopes, batch = run(compose(DropPunished(), ClipHigher(), *aggregate), PUNISHED)
    assert out.loss.item() == 0.0
    assert out.loss.requires_grad
    assert not slopes["logp"].any()
    assert out.metrics()["tokens/kept"] == 0.0
    assert make_plan(compose(DropPunished()), [batch]).has_no_gradient


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_penalties_hold_whatever_the_masks_drop(aggregate):
    penalties = KLPenalty(coefficient=0.3), EntropyBonus(coefficient=0.2)
    expected = run(compose(*penalties, Scale(weight=0.0), *aggregate), PUNISHED)
    masked = run(compose(*penalties, DropPunished(), *aggregate), PUNISHED)
    assert masked[0].loss.item() == pytest.approx(expected[0].loss.item(), rel=REORDERED)
    for field, slopes in expected[1].items():
        assert torch.equal(masked[1][field], slopes)
    assert not make_plan(compose(*penalties, DropPunished()), [masked[2]]).has_no_gradient


def test_a_plan_is_silent_where_nothing_has_a_gradient():
    batch = batch_of([[token(A=0.0)], [token(A=0.0)]])

    def silent(*methods):
        return make_plan(compose(*methods), [batch]).has_no_gradient

    assert silent()
    assert silent(KLPenalty(coefficient=0.0), LpReg())
    assert not silent(KLPenalty())
    assert not silent(Scale(bonus=0.5))
    assert silent(Scale(bonus=0.5, weight=0.0))


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_dropped_tokens_have_exactly_no_gradient(aggregate):
    objective = compose(Noise(), ClipHigher(low=1.0, high=100.0), *aggregate)
    _, slopes, batch = run(objective, ROWS)
    keep = make_plan(objective, [batch]).terms(batch).keep
    assert not slopes["logp"][~keep].any()
    assert torch.equal(slopes["logp"] != 0, keep & (batch.advantages != 0))


def test_log_ratio_is_clamped_before_the_exponential():
    drifts = [1e4, -1e4, 30.0, -30.0, 20.0, -20.0]
    rows = [[token(now=-2e4, drift=drift, A=advantage) for drift in drifts] for advantage in (1.0, -1.0)]
    out, slopes, _ = run(compose(), rows)
    at_edge = [math.exp(20) / 12, math.exp(-20) / 12]
    assert math.isfinite(out.loss.item())
    assert slopes["logp"].tolist() == pytest.approx([*[0.0] * 4, *(-x for x in at_edge), *[0.0] * 4, *at_edge])
    for objective in (compose(ClipHigher(dual_clip=3.0), KLPenalty()), compose(KLPenalty(cap=None), Exempt())):
        assert all(torch.isfinite(values).all() for values in run(objective, rows)[1].values())


def test_live_ratio_is_exactly_one_with_the_gradient_of_the_log_prob():
    out, slopes, batch = run(compose(ClipHigher(low=0.0, high=0.0)), ROWS, live_ratio=True)
    n = len(batch)
    assert_near(slopes["logp"], -batch.advantages / n, 2)  # divided, or times the reciprocal
    assert out.loss.item() == pytest.approx(-batch.advantages.mean().item(), rel=REORDERED)
    assert out.metrics()["ratio/mean"] == 1.0


def test_exempt_tokens_pull_outside_the_trust_region():
    rows = [[token(drift=1.0), token(drift=-1.0, A=-1.0)]]
    _, held, _ = run(compose(ClipHigher()), rows)
    assert held["logp"].tolist() == [0.0, 0.0]
    _, free, _ = run(compose(ClipHigher(), Exempt()), rows)
    assert free["logp"].tolist() == pytest.approx([-math.exp(1.0) / 2, math.exp(-1.0) / 2])


def test_sequences_without_a_kept_token_do_not_count():
    rows = [[token(A=1.0)] * 2, [token(A=-1.0)] * 3, [token(A=4.0)], []]
    assert run(compose(DropPunished(), SequenceMean()), rows)[0].loss.item() == pytest.approx(-(1 + 4) / 2)
    assert run(compose(DropPunished(), ConstantLength(length=5)), rows)[0].loss.item() == pytest.approx(-(2 + 4) / 10)
    assert run(compose(DropPunished()), rows)[0].loss.item() == pytest.approx(-(2 + 4) / 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("methods", [(), (ClipHigher(),), (DropPunished(), KLPenalty())])
def test_nonfinite_live_values_make_the_loss_nan_and_the_call_refuse(bad, methods):
    batch = batch_of(ROWS)
    policy, _ = live_of(batch, ROWS)
    values = policy.logprobs.detach().clone()
    values[[2, 5]] = bad
    broken = replace(policy, logprobs=values.requires_grad_())
    objective = compose(*methods)
    out = make_plan(objective, [batch]).loss(batch, broken)
    assert math.isnan(out.loss.item())
    assert out.nonfinite == 2
    with pytest.raises(NonFinite):
        objective(batch, broken, state=objective.init_state())


def test_live_outputs_are_read_only_where_a_penalty_names_them():
    batch = batch_of(ROWS)
    policy, leaves = live_of(batch, ROWS)
    plan = make_plan(compose(LpReg(share=0.4)), [batch])
    rows = plan.live_rows(batch)
    assert set(rows) == {"logprobs", "log_kept_mass"}
    assert 0 < rows["log_kept_mass"].sum() < len(batch)
    expected = make_plan(plan.objective, [batch]).loss(batch, policy).loss
    partial = torch.where(rows["log_kept_mass"], policy.log_kept_mass, math.nan)
    out = plan.loss(batch, replace(policy, log_kept_mass=partial))
    assert torch.equal(out.loss, expected)
    out.loss.backward()
    assert torch.equal(gradients(batch, leaves)["live_mass"] != 0, rows["log_kept_mass"])


def test_statistics_of_each_part_alone_change_the_loss_and_warn():
    rows, parts = random_rows(11, [3, 5, 4, 7, 4, 6, 1, 8]), (range(4), range(4, 8))
    objective = compose(S2TMask(), TopEntropyMask(share=0.6), STARE(target_entropy=0.5))

    def loss(scope):
        batches = [batch_of([rows[row] for row in part], part) for part in parts]
        plan = make_plan(objective, batches, scope=scope)
        live = [live_of(batch, [rows[row] for row in part])[0] for batch, part in zip(batches, parts, strict=True)]
        return sum(plan.loss(*one).loss.item() for one in zip(batches, live, strict=True))

    with pytest.warns(UserWarning, match="scope: microbatch"):
        alone = loss("microbatch")
    assert alone != pytest.approx(loss("step"), rel=1e-3)


DIFFERENTIABLE = {
    "plain": (),
    "clip": (ClipHigher(),),
    "dual clip": (ClipHigher(dual_clip=1.2),),
    "a gate": (Unweighted(), ClipHigher()),
    "mask, weight, bonus": (ClipHigher(), S2TMask(), STARE(), Scale(weight=0.5, bonus=0.1)),
    "kl": tuple(KLPenalty(coefficient=0.3, estimator=one) for one in ("k1", "k2", "k3", "k3_straight_through")),
    "capped kl": (KLPenalty(coefficient=0.3, cap=0.01),),
    "entropy": (EntropyBonus(), AdaptiveEntropy(target_entropy=5.0, initial=0.1, high=0.2), SequenceMean()),
    "lp_reg": (LpReg(share=0.4), ClipHigher(), ConstantLength(length=5)),
    "lp_reg, code": (LpReg(share=0.4, form="code"), ClipHigher()),
    "lp_reg, capped": (LpReg(share=0.4, ratio_cap=1.3),),
}


def test_gradients_live_only_in_the_outputs():
    batch = batch_of(ROWS)
    policy, _ = live_of(batch, ROWS)
    methods = [method for chosen in DIFFERENTIABLE.values() for method in chosen if method.name != "clip_higher"]
    methods = [one for one in methods if not one.writes & {"bounds", "aggregate", "surrogate", "unclipped"}]
    out = make_plan(compose(*methods), [batch]).loss(batch, policy)
    assert not any(one.total.requires_grad for one in out.report.values())


def test_report_counts_what_the_trust_region_stopped():
    rows = [
        [token(now=-2.0, drift=math.log(ratio), A=1.0) for ratio in (1.5, 1.1, 0.5, 0.7)],
        [token(now=-2.0, drift=math.log(ratio), A=-1.0) for ratio in (1.5, 3.5, 0.5, 0.7)],
    ]
    report = run(compose(ClipHigher(dual_clip=3.0)), rows)[0].metrics()
    assert report["ratio/clipped_high"] == 1 / 8
    assert report["ratio/clipped_low"] == 2 / 8
    assert report["ratio/clipped_dual"] == 1 / 8
    assert report["tokens/kept"] == 1.0
    assert report["tokens/entropy"] == 0.5
    assert report["ratio/mean"] == pytest.approx((1.5 + 1.1 + 0.5 + 0.7 + 1.5 + 3.5 + 0.5 + 0.7) / 8)
    exempt = run(compose(ClipHigher(dual_clip=3.0), Exempt()), rows)[0].metrics()
    assert {exempt[f"ratio/clipped_{side}"] for side in ("high", "low", "dual")} == {0.0}
    dropped = run(compose(ClipHigher(), DropPunished()), rows)[0].metrics()
    assert dropped["ratio/clipped_high"] == 1 / 4
    assert dropped["tokens/kept"] == 1 / 2


def test_only_the_sign_of_the_advantage_decides_which_bound_stopped_a_token():
    rows = [[token(now=-2.0, drift=math.log(ratio), A=A) for ratio in (1.5, 3.5, 0.5)] for A in (-0.5, 0.0, 0.5)]
    report = run(compose(ClipHigher(dual_clip=3.0)), rows)[0].metrics()
    assert report["ratio/clipped_high"] == 2 / 9
    assert report["ratio/clipped_low"] == 1 / 9
    assert report["ratio/clipped_dual"] == 1 / 9
