import math
from dataclasses import replace

import pytest
import torch

from rlstab import (
    STARE,
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
from tests.core.methods import DropPunished, Exempt, Scale, Unweighted
from tests.core.steps import batch_of, gradients, live_of, random_rows, token

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


def test_a_plan_is_silent_where_nothing_has_a_gradient():
    batch = batch_of([[token(A=0.0)], [token(A=0.0)]])

    def silent(*methods):
        return make_plan(compose(*methods), [batch]).has_no_gradient

    assert silent()
    assert silent(KLPenalty(coefficient=0.0), LpReg())
    assert not silent(KLPenalty())
    assert not silent(Scale(bonus=0.5))
    assert silent(Scale(bonus=0.5, weight=0.0))


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
        return sum(plan.loss(*pair).loss.item() for pair in zip(batches, live, strict=True))

    with pytest.warns(UserWarning, match="scope: microbatch"):
        alone = loss("microbatch")
    assert alone != pytest.approx(loss("step"), rel=1e-3)


def test_gradients_live_only_in_the_outputs():
    batch = batch_of(ROWS)
    methods = KLPenalty(), EntropyBonus(), LpReg(share=0.4), Unweighted(), S2TMask(), STARE(), Scale(bonus=0.1)
    out = make_plan(compose(*methods), [batch]).loss(batch, live_of(batch, ROWS)[0])
    assert not any(mean.total.requires_grad for mean in out.report.values())


def test_report_counts_what_the_trust_region_stopped():
    """By the sign of the advantage alone."""
    ratios = (1.5, 3.5, 0.5, 0.7)
    rows = [[token(now=-2.0, drift=math.log(ratio), A=A) for ratio in ratios] for A in (0.5, -1.0, 0.0)]

    def report(*methods):
        metrics = run(compose(ClipHigher(dual_clip=3.0), *methods), rows)[0].metrics()
        return [metrics[f"ratio/clipped_{side}"] for side in ("high", "low", "dual")], metrics

    clipped, metrics = report()
    assert clipped == [2 / 12, 2 / 12, 1 / 12]
    assert (metrics["tokens/kept"], metrics["tokens/entropy"]) == (1.0, 0.5)
    assert metrics["ratio/mean"] == pytest.approx(sum(ratios) / 4)
    assert report(Exempt())[0] == [0.0, 0.0, 0.0]
    clipped, metrics = report(DropPunished())
    assert (clipped, metrics["tokens/kept"]) == ([2 / 8, 0.0, 0.0], 2 / 3)
