"""What an author may write and leave out: a class is a frozen dataclass by itself, and a method is called by itself."""

import dataclasses
import pickle
from dataclasses import dataclass
from typing import Annotated

import pytest

import rlstab as r
from rlstab import STARE, Range, S2TMask, Settled, Terms, TokenObjective, compose, make_plan
from rlstab.core.batch import layout_of
from rlstab.core.compose import Composition, Within
from rlstab.core.metadata import docstring, summary
from rlstab.core.method_settings import Setting, settings_of
from rlstab.core.terms import Totals
from rlstab.errors import ShapeError
from rlstab.zoo import METHODS
from tests.core.methods import Chooser
from tests.core.steps import batch_of, live_of, random_rows

ROWS = random_rows(11, [3, 5, 0, 7, 4])


class Plain(TokenObjective):
    """Keep tokens above a log-prob."""

    name = "plain"
    needs: set[str] = {"logprobs"}  # annotated, and no setting for that
    writes = {"keep"}

    above: Annotated[float, Range(le=0)] = -5.0

    def terms(self, batch, stat, state):
        return Terms(keep=batch.logprobs > self.above)


@dataclass(frozen=True)
class Decorated(Plain):
    """The same, with the decorator written out, and one setting more."""

    name = "decorated"

    more: int = 1


def test_a_class_is_a_frozen_dataclass_by_itself():
    assert [setting.name for setting in settings_of(Plain)] == ["above"]
    assert [setting.name for setting in settings_of(Decorated)] == ["above", "more"]
    assert Decorated(-1.0, 2) == Decorated(above=-1.0, more=2) != Decorated()
    assert hash(Plain()) == hash(Plain(-5.0))
    assert repr(Plain()) == "Plain(above=-5.0)"
    assert (type(Plain.needs), Plain.needs) == (frozenset, {"logprobs"})
    for method in (Plain(), Decorated()):
        assert pickle.loads(pickle.dumps(method)) == dataclasses.replace(method) == method
        for change in (lambda method: setattr(method, "above", 0.0), lambda method: delattr(method, "above")):
            with pytest.raises(dataclasses.FrozenInstanceError):
                change(method)


def test_a_method_alone_is_called_as_its_composition():
    batch = batch_of(ROWS)
    for method in (S2TMask(max_prob=0.05), STARE(target_entropy=9.0)):
        first, second = [], []
        for objective, seen in ((method, first), (compose(method), second)):
            state = objective.init_state()
            for _ in range(2):
                policy, leaves = live_of(batch, ROWS)
                out = objective(batch, policy, state=state)
                out.loss.backward()
                state = out.state
                seen += [out.loss.item(), leaves["logp"].grad, out.metrics()]
        assert repr(first) == repr(second)
        assert out.state == {method.name: method.init_state() if method.name == "s2t" else out.state[method.name]}


def test_a_method_does_not_see_how_its_tokens_were_padded():
    class Peeks(TokenObjective):
        name = "peeks"

        def terms(self, batch, stat, state):
            with pytest.raises(ShapeError):
                layout_of(batch)
            return Terms()

    batch = batch_of(ROWS)
    assert layout_of(batch).shape[0] == 5
    assert make_plan(Peeks(), [batch]).part(batch).batch is batch


def test_statistics_are_a_mapping_as_any_other():
    settled = Settled({"a": Settled()})
    assert "b" not in settled
    assert settled.get("b") is None
    with pytest.raises(KeyError, match="'b'"):
        settled["b"]


def test_settings_and_docstrings_are_read_off_the_class():
    assert list(map(str, settings_of(Chooser))) == [
        *("int in [1, inf)", "float in (0, 1]", "float in (1, inf) or None", "'kept' | 'all'", "'a' | 'b' or None"),
        *("bool", "float", "str"),
    ]
    for name, value in {"share": 1e-9, "cap": 2, "mode": "all", "maybe": "b", "flag": True, "free": -1e9}.items():
        assert getattr(Chooser(must=3, **{name: value}), name) == value
    assert (docstring(Plain), summary(Chooser)) == ("Keep tokens above a log-prob.", "One setting of each kind.")
    assert docstring(type("Silent", (Plain,), {"name": "silent"})) == ""
    assert r.Mismatch().in_words().keys() == {"report"}  # it fills no term


WITH_TENSORS = [r.Bounds, r.LossOutput, r.Mean, r.Penalty, r.Plan, r.PolicyOutputs, r.Pool, Terms, r.TokenBatch]
PLAIN = [Composition, Range, Setting, r.Threshold, Totals, Within, *map(METHODS.get, METHODS.names())]


def test_records_are_constant_and_never_compared_tensor_by_tensor():
    for cls in [*WITH_TENSORS, *PLAIN]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            object.__new__(cls).anything = None
    for cls in WITH_TENSORS:
        assert (cls.__eq__, cls.__hash__) == (object.__eq__, object.__hash__)
