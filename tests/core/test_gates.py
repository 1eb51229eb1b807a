"""Gates give the gradients of published surrogates, multiply, and are reported as they act."""

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from rlstab import (
    ASPO,
    CEGPPO,
    CPPO,
    DPPO,
    DRPO,
    GSPO,
    SAPO,
    ClipHigher,
    Gate,
    SequenceMean,
    Terms,
    TokenObjective,
    compose,
    make_plan,
    within,
)
from rlstab.core.terms import Constants
from rlstab.errors import NonFinite
from tests.core.gate_methods import CISPO, OneSided
from tests.core.methods import DropPunished, Noise, Scale
from tests.core.steps import batch_of, gradients, live_of, random_rows, run_parts, token

ROWS = [
    [{**own, "logp": min(own["logp"], 0.0)} for own in row] for row in random_rows(5, [6, 9, 0, 12, 7, 1, 10, 8, 11, 9])
]
#: Rounding of one operation in float64.
EPS = 2.0**-53


def run(objective, rows=ROWS, **options):
    batch = batch_of(rows, **options)
    policy, leaves = live_of(batch, rows)
    out = objective(batch, policy, state=objective.init_state())
    out.loss.backward()
    return out, gradients(batch, leaves)["logp"], batch


#: Ratios 1.5 and 1.1 rewarded, 0.5 and 0.9 punished.
FOUR = [
    [token(drift=math.log(1.5), A=1.0), token(drift=math.log(1.1), A=1.0)],
    [token(drift=math.log(0.5), A=-2.0), token(drift=math.log(0.9), A=-2.0)],
]


def test_a_gate_beside_a_trust_region_is_clipped_and_reported_as_such():
    out, slopes, _ = run(compose(CISPO(high=0.05), ClipHigher(low=0.2, high=0.28)), FOUR)
    # the clip stops the first and the third; the gate holds the second at 1.05 and leaves the fourth alone
    assert slopes.tolist() == pytest.approx([0.0, -1.05 / 4, 0.0, 2 * 0.9 / 4], rel=1e-15)
    assert slopes[0] == slopes[2] == 0
    metrics = out.metrics()
    assert metrics["ratio/clipped_high"] == metrics["ratio/clipped_low"] == 1 / 4
    wide = run(compose(CISPO(high=0.05), ClipHigher(low=0.9, high=9.0)), FOUR)
    assert wide[0].metrics()["ratio/clipped_high"] == wide[0].metrics()["ratio/clipped_low"] == 0
    assert (wide[1] != 0).all()


def test_gates_multiply():
    each = [run(compose(method), ROWS)[1] for method in (CISPO(high=0.1), SAPO())]
    both, plain = run(compose(CISPO(high=0.1), SAPO()), ROWS)[1], run(compose(), ROWS)[1]
    torch.testing.assert_close(both * plain, each[0] * each[1], rtol=8 * EPS, atol=0)


def test_a_gate_sees_the_ratio_of_the_sequence_and_that_sees_what_is_kept():
    rows = [row for row in ROWS if row]
    objective = compose(CISPO(high=0.1), GSPO(), Noise(), SequenceMean())
    _, slopes, batch = run(objective, rows)
    keep = make_plan(objective, [batch]).terms(batch).keep
    gap = torch.tensor([own["logp"] - own["old"] for row in rows for own in row], dtype=torch.float64)
    mean, kept = batch.sequence_mean(gap, keep), batch.sequence_total(keep)
    assert (mean != batch.sequence_mean(gap)).any()
    assert (mean.exp() > 1.1).any()
    divisor = batch.spread(kept) * (kept > 0).sum()
    expected = -batch.spread(mean).exp().clamp(max=1.1) * batch.advantages / divisor
    assert slopes.tolist() == pytest.approx(torch.where(keep, expected, 0.0).tolist(), rel=1e-14)


def test_a_ratio_and_a_gate_read_the_advantage_after_bonuses():
    lifted = compose(OneSided(), CEGPPO(), DRPO(0.15), Scale(bonus=0.6))
    _, slopes, batch = run(lifted)
    raised = [[{**own, "A": own["A"] + 0.6} for own in row] for row in ROWS]
    assert any((a > 0) != (b > 0) for a, b in zip(batch.advantages, batch_of(raised).advantages, strict=True))
    assert torch.equal(slopes, run(compose(OneSided(), CEGPPO(), DRPO(0.15)), raised)[1])


class Spoils(TokenObjective):
    """A gate that is ``value`` on tokens of low entropy; it notes how many tokens it was shown."""

    name = "spoils"
    needs = {"entropies"}
    writes = {"gates"}
    value: float = math.nan
    acts: bool = True
    seen: ClassVar[list[int]] = []

    def terms(self, batch, stat, state):
        chosen = batch.signal("entropies") < 0.2

        def gate(ratio, constants):
            assert isinstance(constants, Constants)
            assert not ratio.requires_grad
            assert not torch.is_grad_enabled()
            self.seen.append(ratio.numel())
            return torch.where(chosen, self.value, torch.ones_like(ratio))

        return Terms(gates={"": Gate(gate, acts=self.acts)})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gate_that_is_not_finite_refuses_the_step(value):
    batch = batch_of(ROWS)
    policy, _ = live_of(batch, ROWS)
    spoiled = int(((batch.entropies < 0.2) & (batch.advantages != 0)).sum())
    assert 0 < spoiled < int((batch.entropies < 0.2).sum())  # where nothing pulls, a gate is not used
    out = make_plan(compose(Spoils(value)), [batch]).loss(batch, policy)
    assert out.nonfinite == spoiled
    assert math.isnan(out.loss.item())
    with pytest.raises(NonFinite):
        compose(Spoils(value))(batch, policy)
    watched = compose(Spoils(value, acts=False))(batch, policy)
    assert torch.equal(watched.loss, compose()(batch, policy).loss)


def test_within_shows_a_gate_only_what_the_outer_method_keeps():
    Spoils.seen.clear()
    objective = compose(within(DropPunished(), Spoils(2.0)))
    out, slopes, batch = run(objective)
    kept = batch.advantages >= 0
    assert Spoils.seen == [int(kept.sum())]
    chosen = (batch.entropies < 0.2) & batch.rewarded
    assert 0 < chosen.sum() < batch.rewarded.sum()
    plain = run(compose(DropPunished()))[1]
    torch.testing.assert_close(slopes, torch.where(chosen, 2.0, 1.0) * plain, rtol=4 * EPS, atol=0)
    counted = out.report["within/inner/gate"]
    assert counted.count == batch.rewarded.sum()
    assert counted.total == int(batch.rewarded.sum()) + int(chosen.sum())


def test_metrics_of_gates_and_of_a_pull_by_hand_and_over_parts():
    rows = [
        [token(drift=math.log(2.0), A=1.0, now=-3.0), token(drift=math.log(1.25), A=1.0, now=-0.5)],
        [token(drift=math.log(0.5), A=-1.0, now=-0.5), token(drift=math.log(4.0), A=0.0)],
    ]
    # probabilities move by 0.05, 0.15 and -0.30; the last token has no advantage, so it is not counted
    gates = {"cispo/gate": (0.6 + 0.96 + 1.0) / 3, "cispo/stopped": 0.0, "cppo/gate": 1 / 3, "cppo/stopped": 2 / 3}
    pulls = {"ratio/surrogate": 1.5 / 3, "ratio/stopped": 2 / 3}
    for objective, expected in (
        (compose(CISPO(high=0.2), CPPO(0.1, min_weight=1.0, min_budget=1.0, anchor="old")), gates),
        (compose(DPPO(high=0.1, low=0.1, cap=1.5, anchor="old")), pulls),
    ):
        for parts in ([[0, 1]], [[0], [1]], [[1], [], [0]]):
            _, report = run_parts(objective, rows, parts)
            for name, value in expected.items():
                assert report[name].value == pytest.approx(value, rel=1e-14), name
                assert report[name].count == 3


def test_a_gate_needs_no_more_live_rows_unless_it_reads_whole_sequences():
    batch = batch_of(ROWS)

    def rows(*methods):
        return make_plan(compose(*methods, Noise()), [batch]).live_rows(batch)

    plain, whole = rows()["logprobs"], rows(CPPO())["logprobs"]
    for methods in ((CISPO(), SAPO(), DRPO()), (DPPO(),), (ASPO(),)):
        assert torch.equal(rows(*methods)["logprobs"], plain)
    assert torch.equal(rows(CPPO())["logprobs"], whole)
    reached = torch.zeros(batch.num_sequences, dtype=torch.bool)
    reached[batch.sequence[plain]] = True
    assert torch.equal(whole, batch.spread(reached))
    assert plain.sum() < whole.sum() < len(batch)


def test_a_gate_holds_its_constants_where_the_input_moves():
    """Finite differences of the loss with the anchor held are its gradient, for a gate of whole sequences too."""
    batch = batch_of(ROWS)
    policy, _ = live_of(batch, ROWS)
    anchor = policy.constant()
    plan = make_plan(compose(CPPO(), SAPO(), GSPO(), ClipHigher(), SequenceMean()), [batch])

    def loss(logprobs):
        return plan.loss(batch, replace(anchor, logprobs=logprobs), anchor=anchor).loss

    assert torch.autograd.gradcheck(loss, [anchor.logprobs.clone().requires_grad_()])
