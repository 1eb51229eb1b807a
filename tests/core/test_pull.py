"""What takes the place of the ratio: its gradient, its metrics, and with what it cannot be composed."""

import math
import warnings

import pytest
import torch

from rlstab import Gate, Surrogate, Terms, TokenObjective, compose, make_plan
from rlstab.core.metadata import About
from rlstab.errors import Conflict, FitWarning
from tests.core.methods import Exempt
from tests.core.steps import batch_of, gradients, live_of, random_rows, token

ROWS = random_rows(5, [6, 9, 0, 12, 7, 1])


class Capped(TokenObjective):
    """The ratio, at most ``cap``; 0 below ``floor``."""

    name = "capped"
    writes = {"surrogate"}
    cap: float = 1.1
    floor: float = 0.0

    def terms(self, batch, stat, state):
        def pull(ratio, constants):
            return torch.where(ratio < self.floor, 0.0, ratio.clamp(max=self.cap))

        return Terms(surrogate=Surrogate(pull))


class Halving(TokenObjective):
    name = "halving"
    writes = {"gates"}

    def terms(self, batch, stat, state):
        return Terms(gates={"": Gate(lambda ratio, constants: torch.full_like(ratio, 0.5))})


def run(objective, rows=ROWS):
    batch = batch_of(rows)
    policy, leaves = live_of(batch, rows)
    out = objective(batch, policy)
    out.loss.backward()
    return out, gradients(batch, leaves)["logp"], batch


def test_a_token_pulls_with_it_in_place_of_the_ratio():
    rows = [[token(drift=math.log(r), A=a) for r in (0.5, 1.0, 1.5)] for a in (1.0, -2.0)]
    out, slopes, _ = run(compose(Capped(cap=1.1, floor=0.6)), rows)
    assert slopes.tolist() == pytest.approx([0.0, -1 / 6, -1.1 / 6, 0.0, 2 / 6, 2.2 / 6], rel=1e-15)
    assert out.loss.item() == pytest.approx(float(slopes.sum()), rel=1e-15)
    metrics = out.metrics()
    assert metrics["ratio/surrogate"] == pytest.approx(2.1 / 3)
    assert metrics["ratio/stopped"] == pytest.approx(1 / 3)


def test_a_pull_that_is_the_ratio_changes_nothing_bit_for_bit():
    (pulled, slopes, _), (plain, expected, _) = run(compose(Capped(cap=1e9))), run(compose())
    assert torch.equal(pulled.loss, plain.loss)
    assert torch.equal(slopes, expected)


def test_gates_and_weights_multiply_it_and_exempt_tokens_pull_with_their_ratio():
    plain, capped = run(compose())[1], run(compose(Capped()))[1]
    torch.testing.assert_close(run(compose(Capped(), Halving()))[1], capped / 2, rtol=1e-15, atol=0)
    assert not torch.equal(capped, plain)
    assert torch.equal(run(compose(Capped(cap=0.1), Halving(), Exempt()))[1], plain)


class Particular(TokenObjective):
    """Excludes a field where a setting says so, and expects another one."""

    name = "particular"
    writes = {"weight"}
    about = About(expects={"aggregate": "it divides by lengths.", "s2t": "it was published on top of it."})
    strict: bool = True

    @property
    def excludes(self):
        return {"gates": "it weighs tokens by itself."} if self.strict else {}

    def terms(self, batch, stat, state):
        return Terms(weight=torch.ones_like(batch.logprobs))


def test_a_method_can_exclude_a_field_and_only_at_some_settings():
    with pytest.raises(Conflict, match="'particular' and 'halving' exclude each other: it weighs tokens by itself"):
        compose(Halving(), Particular())
    assert len(compose(Halving(), Particular(strict=False)).members) == 2


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
