"""Gates, and what replaces the ratio: their gradients, their metrics, the tokens that they see."""

import math
import warnings
from typing import ClassVar

import pytest
import torch

from rlstab import (
    ASPO,
    CEGPPO,
    CPPO,
    DPPO,
    DRPO,
    GMPO,
    SAPO,
    Gate,
    Terms,
    TokenObjective,
    compose,
    make_plan,
    within,
)
from rlstab.core.metadata import About
from rlstab.core.terms import Constants
from rlstab.errors import FitWarning, NonFinite
from tests.core.methods import Capped, CappedGate, DropPunished, Exempt, Noise, Scale
from tests.core.steps import batch_of, gradients, live_of, random_rows, run_parts, token

ROWS = random_rows(5, [6, 9, 0, 12, 7, 1, 10, 8, 11, 9])


def run(objective, rows=ROWS, **options):
    batch = batch_of(rows, **options)
    policy, leaves = live_of(batch, rows)
    out = objective(batch, policy, state=objective.init_state())
    out.loss.backward()
    return out, gradients(batch, leaves)["logp"], batch


def test_gates_multiply_it_and_exempt_tokens_pull_with_their_ratio():
    choices = (), (Capped(),), (CappedGate(),), (Capped(), CappedGate())
    plain, capped, gated, both = (run(compose(*methods))[1] for methods in choices)
    torch.testing.assert_close(both * plain, capped * gated, rtol=1e-15, atol=0)
    assert not torch.equal(capped, plain)
    assert not torch.equal(gated, plain)
    assert torch.equal(run(compose(Capped(cap=0.1), CappedGate(0.1), Exempt()))[1], plain)


def test_a_ratio_and_a_gate_read_the_advantage_after_bonuses():
    lifted = compose(GMPO(), CEGPPO(), DRPO(0.15), Scale(bonus=0.6))
    _, slopes, batch = run(lifted)
    raised = [[{**own, "A": own["A"] + 0.6} for own in row] for row in ROWS]
    assert any((a > 0) != (b > 0) for a, b in zip(batch.advantages, batch_of(raised).advantages, strict=True))
    assert torch.equal(slopes, run(compose(GMPO(), CEGPPO(), DRPO(0.15)), raised)[1])


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
    torch.testing.assert_close(slopes, torch.where(chosen, 2.0, 1.0) * plain, rtol=1e-15, atol=0)
    counted = out.report["within/inner/gate"]
    assert counted.count == batch.rewarded.sum()
    assert counted.total == int(batch.rewarded.sum()) + int(chosen.sum())


def test_metrics_of_gates_and_of_a_pull_by_hand_and_over_parts():
    rows = [
        [token(drift=math.log(2.0), A=1.0, now=-3.0), token(drift=math.log(1.25), A=1.0, now=-0.5)],
        [token(drift=math.log(0.5), A=-1.0, now=-0.5), token(drift=math.log(4.0), A=0.0)],
    ]
    # probabilities move by 0.05, 0.15 and -0.30; the last token has no advantage, so it is not counted
    gates = {
        "capped_gate/gate": (0.6 + 0.96 + 1.0) / 3,
        "capped_gate/stopped": 0.0,
        "cppo/gate": 1 / 3,
        "cppo/stopped": 2 / 3,
    }
    pulls = {"ratio/surrogate": 1.5 / 3, "ratio/stopped": 2 / 3}
    for objective, expected in (
        (compose(CappedGate(1.2), CPPO(0.1, min_weight=1.0, min_budget=1.0, anchor="old")), gates),
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
    for methods in ((CappedGate(), SAPO(), DRPO()), (DPPO(),), (ASPO(),)):
        assert torch.equal(rows(*methods)["logprobs"], plain)
    assert torch.equal(rows(CPPO())["logprobs"], whole)
    reached = torch.zeros(batch.num_sequences, dtype=torch.bool)
    reached[batch.sequence[plain]] = True
    assert torch.equal(whole, batch.spread(reached))
    assert plain.sum() < whole.sum() < len(batch)


class Particular(TokenObjective):
    """Expects two others."""

    name = "particular"
    writes = {"weight"}
    about = About(expects={"aggregate": "it divides by lengths.", "s2t": "it was published on top of it."})

    def terms(self, batch, stat, state):
        return Terms(weight=torch.ones_like(batch.logprobs))


def test_a_method_without_what_it_expects_is_told_where_a_loss_is_made():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective = compose(Particular())  # it may grow
    with pytest.warns(FitWarning) as caught:
        make_plan(objective, [])
    assert [str(warning.message).partition(" in ")[0] for warning in caught] == [
        "'particular' expects a method that writes 'aggregate'",
        "'particular' expects 's2t'",
    ]
