"""What a user does wrong is told when it happens: who, what, and the cure. Each case is one mistake.

The texts stand in tests/errors.txt, to be read as a whole; ``python -m tests.core.test_errors`` writes it anew.

Deliberately not checked, for it would wait for the device or cannot be told from what is right:

- a gate that is NaN or negative on some tokens: `plan.loss` counts NaN in `nonfinite`, and a whole call raises;
- weights of what is only observed, and weights whose product alone overflows;
- prompts that the response mask counts;
- a part of which the loss is never taken, and a `plan.state` that nobody passes on.
"""

from __future__ import annotations

import functools
import math
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch

import rlstab
from rlstab import (
    NOTHING,
    STARE,
    Bounds,
    ClipHigher,
    EntropyBonus,
    Gate,
    KLPenalty,
    Mean,
    Penalty,
    PolicyOutputs,
    Pool,
    Range,
    S2TMask,
    Surrogate,
    Terms,
    TokenBatch,
    TokenObjective,
    compose,
    make_plan,
    observe,
    preset,
    register,
    within,
)
from rlstab.config import dump_objective, json_schema, load_objective, objective_hash
from rlstab.config.document import dump
from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.core.terms import WRITABLE
from rlstab.errors import (
    ConfigError,
    Conflict,
    MethodError,
    MissingSignal,
    NonFinite,
    OutOfRange,
    ShapeError,
    UnknownName,
)
from rlstab.testing.run import ThreadComm
from rlstab.zoo import METHODS
from tests.core.methods import DropPunished, Scale
from tests.core.says import says
from tests.core.steps import batch_of, live_of, random_rows

ROWS = random_rows(11, [3, 2])
NAN, INF = math.nan, math.inf


def a_class(**attributes: Any) -> type[TokenObjective]:
    """A class of a method that asks for nothing; the attributes say otherwise."""
    own = {"name": "mine", "terms": lambda self, batch, stat, state: Terms(), "__module__": __name__}
    return type("Mine", (TokenObjective,), own | attributes)


def asking(make, *, writes=None, **attributes) -> TokenObjective:
    """A method whose terms are what ``make`` returns of a batch."""
    writes = frozenset(WRITABLE if writes is None else writes)
    return a_class(writes=writes, terms=lambda self, batch, stat, state: make(batch), **attributes)()


def planned(make, **attributes):
    """Plan a step of a method whose terms are what ``make`` returns of a batch."""
    return lambda: make_plan(compose(asking(make, **attributes)), [batch_of(ROWS)])


def lost(make, **attributes):
    """Make the loss of a step of such a method."""

    def act():
        batch = batch_of(ROWS)
        return make_plan(compose(asking(make, **attributes)), [batch]).loss(batch, live_of(batch, ROWS)[0])

    return act


def measured(method="measure", **attributes):
    """Plan a step in two parts of a method that measures otherwise."""

    def act():
        parts = [batch_of(ROWS[:1], [0]), batch_of(ROWS[1:], [1])]
        return make_plan(compose(a_class(**attributes)()), parts)

    return act


def like(batch, value):
    return torch.full_like(batch.advantages, value)


def stated(**attributes):
    return lambda: make_plan(compose(a_class(**attributes)()), [batch_of(ROWS)])


def padded(**changes):
    """Build a batch of 2 rows and 3 columns."""
    ones = torch.ones(2, 3)
    given = {"response_mask": ones, "advantages": torch.ones(2), "old_logprobs": -ones}
    return lambda: TokenBatch.from_padded(**(given | changes))


def whole(objective=None, policy=None, **options):
    """Call an objective on a batch and live outputs, perhaps changed."""

    def act():
        batch = batch_of(ROWS)
        live = live_of(batch, ROWS)[0]
        return (objective or compose())(batch, live if policy is None else policy(live), **options)

    return act


def plan_of(*parts):
    return lambda: make_plan(compose(), list(parts))


def with_setting(hint, default):
    """Make a method that has a setting of this type."""
    return lambda: a_class(__annotations__={"chosen": hint}, chosen=default)()


def careless():
    """A ``__post_init__`` that does not call the one of TokenObjective."""
    return a_class(
        __annotations__={"share": Annotated[float, Range(gt=0, le=1)]}, share=0.5, __post_init__=lambda self: None
    )(share=2.0)


def by_tokens(one, other):
    return lambda self, batch, *stat: one(batch) if len(batch) else other(batch)


def mean(batch):
    return Mean.of(batch.advantages)


def excluding(**attributes):
    return a_class(**attributes)()


CLASSES = {
    "a name with a slash": (MethodError, lambda: a_class(name="a/b")),
    "a name with an escape sequence": (MethodError, lambda: a_class(name="\x1b[31mred")),
    "a name that metrics have": (MethodError, lambda: a_class(name="tokens")),
    "no name": (MethodError, lambda: a_class(name=None)),
    "empty name": (MethodError, lambda: a_class(name="")),
    "name of a combinator": (MethodError, lambda: a_class(name="within")),
    "needs as text": (MethodError, lambda: a_class(needs="entropies")),
    "needs as a list": (MethodError, lambda: a_class(needs=["entropies", "ref_logprobs"])),
    "writes as a list": (MethodError, lambda: a_class(writes=["keep"])),
    "writes as a number": (MethodError, lambda: a_class(writes=3)),
    "writes misspelt": (MethodError, lambda: a_class(writes=frozenset({"wieght"}))),
    "live needs of the evidence": (MethodError, lambda: a_class(live_needs=frozenset({"ref_logprobs"}))),
    "drift misspelt": (MethodError, lambda: a_class(reads_drift=frozenset({"samplr"}))),
    "a property that returns text": (MethodError, lambda: compose(a_class(needs=property(lambda self: "entropies"))())),
    "excludes as a set": (MethodError, lambda: a_class(excludes={"kl"})),
    "requires without a reason": (MethodError, lambda: a_class(requires={"bounds": None})),
    "post init without super": (OutOfRange, careless),
    "setting of type dict": (MethodError, with_setting(dict, None)),
    "setting of type list": (MethodError, with_setting(list[int], None)),
    "range on a tuple": (MethodError, with_setting(Annotated[tuple[int, ...], Range(ge=1)], (1,))),
    "annotation that nobody knows": (MethodError, with_setting("Unheard", None)),
    "item out of range": (OutOfRange, with_setting(tuple[Annotated[int, Range(ge=1)], ...], (1, 0))),
    "item of another type": (OutOfRange, with_setting(tuple[int, ...] | None, (1, 0.5))),
    "list for a tuple": (
        OutOfRange,
        lambda: a_class(__annotations__={"chosen": tuple[int, ...]}, chosen=(1,))(chosen=[1]),
    ),
    "register an object": (MethodError, lambda: register(ClipHigher())),
    "register what is no method": (MethodError, lambda: register(int)),
}
MEASURES = {
    "measure returns a tensor": (MethodError, measured(measure=lambda self, batch: batch.advantages)),
    "measure returns None": (MethodError, measured(measure=lambda self, batch: None)),
    "measure returns a dict with a tensor": (
        MethodError,
        measured(measure=lambda self, batch: {"a": batch.advantages.sum()}),
    ),
    "measure returns a dict with a float": (MethodError, measured(measure=lambda self, batch: {"a": 0.5})),
    "measure returns a key that is no text": (MethodError, measured(measure=lambda self, batch: {0: mean(batch)})),
    "measure_again returns a tensor": (MethodError, measured(measure_again=lambda self, batch, stat: batch.advantages)),
    "measure_again returns None": (MethodError, measured(measure_again=lambda self, batch, stat: None)),
    "measure_again returns an int": (MethodError, measured(measure_again=lambda self, batch, stat: {"a": 1})),
    "names differ between parts": (
        MethodError,
        measured(measure=lambda self, batch: {"ab"[len(batch) == 2]: mean(batch)}),
    ),
    "names differ without tokens": (
        MethodError,
        measured(measure=by_tokens(lambda b: {"a": mean(b)}, lambda b: NOTHING)),
    ),
    "names differ without tokens, again": (
        MethodError,
        measured(measure_again=by_tokens(lambda b: {"a": mean(b)}, lambda b: {"a": mean(b), "b": mean(b)})),
    ),
    "kinds differ without tokens": (
        MethodError,
        measured(measure=by_tokens(lambda b: {"a": mean(b)}, lambda b: {"a": Pool.top(b.advantages, 0.5)})),
    ),
    "levels differ between parts": (
        MethodError,
        measured(measure=lambda self, batch: {"a": Pool.top(batch.advantages, 1 / (1 + len(batch)))}),
    ),
    "measure fails without tokens": (
        MethodError,
        measured(measure=lambda self, batch: {"a": Mean.scalar(float(batch.advantages.max()))}),
    ),
    "a name in both rounds": (
        MethodError,
        measured(
            measure=lambda self, batch: {"a": mean(batch)}, measure_again=lambda self, batch, stat: {"a": mean(batch)}
        ),
    ),
    "a statistic that nobody measured": (
        MissingSignal,
        measured(
            measure=lambda self, batch: {"entropy": mean(batch)}, advance=lambda self, state, stat: stat.mean("entropi")
        ),
    ),
    "a pool read as a mean": (
        MethodError,
        measured(
            measure=lambda self, batch: {"a": Pool.top(batch.advantages, 0.5)},
            advance=lambda self, state, stat: stat.mean("a"),
        ),
    ),
    "a quantile in percent": (
        OutOfRange,
        measured(measure=lambda self, batch: {"a": Pool.quantile(batch.advantages, 75)}),
    ),
    "a share of nothing": (OutOfRange, measured(measure=lambda self, batch: {"a": Pool.top(batch.advantages, 0.0)})),
}
STATES = {
    "init_state returns None": (MethodError, stated(init_state=lambda self: None)),
    "advance returns None": (
        MethodError,
        stated(init_state=lambda self: {"k": 0}, advance=lambda self, state, stat: None),
    ),
    "advance drops a key": (
        MethodError,
        stated(init_state=lambda self: {"k": 0, "l": 0}, advance=lambda self, state, stat: {"l": 1}),
    ),
    "advance adds a key": (MethodError, stated(advance=lambda self, state, stat: {"k": 1})),
    "a state that is none": (OutOfRange, lambda: make_plan(compose(STARE()), [batch_of(ROWS)], 5)),
    "a state of a member": (OutOfRange, lambda: make_plan(compose(STARE()), [batch_of(ROWS)], STARE().init_state())),
    "a state of a smaller composition": (
        OutOfRange,
        lambda: make_plan(compose(STARE(), S2TMask()), [batch_of(ROWS)], compose(S2TMask()).init_state()),
    ),
    "a state of a larger composition": (
        OutOfRange,
        lambda: make_plan(compose(S2TMask()), [batch_of(ROWS)], compose(STARE(), S2TMask()).init_state()),
    ),
    "a state of another method of that key": (
        OutOfRange,
        lambda: make_plan(compose(STARE()), [batch_of(ROWS)], {"stare": {"gate": True}}),
    ),
    "no state where one is needed": (OutOfRange, whole(compose(STARE()))),
}
TERMS = {
    "terms returns None": (MethodError, planned(lambda b: None)),
    "fields that were not declared": (
        MethodError,
        planned(lambda b: Terms(weight=like(b, 1), bonus=like(b, 1)), writes={"keep"}),
    ),
    "fields of none declared": (MethodError, planned(lambda b: Terms(weight=like(b, 1)), writes=())),
    "keep of ints": (MethodError, planned(lambda b: Terms(keep=like(b, 1).long()))),
    "keep of floats": (MethodError, planned(lambda b: Terms(keep=like(b, 1)))),
    "keep of sequences": (MethodError, planned(lambda b: Terms(keep=b.sequence_ids >= 0))),
    "keep as a list": (MethodError, planned(lambda b: Terms(keep=[True] * len(b)))),
    "keep on another device": (
        MethodError,
        planned(lambda b: Terms(keep=torch.ones(len(b), dtype=torch.bool, device="meta"))),
    ),
    "exempt of floats": (MethodError, planned(lambda b: Terms(unclipped=like(b, 1)))),
    "weight of ints": (MethodError, planned(lambda b: Terms(weight=like(b, 1).long()))),
    "weight as a number": (MethodError, planned(lambda b: Terms(weight=0.5))),
    "weight with a gradient": (MethodError, planned(lambda b: Terms(weight=like(b, 1).requires_grad_()))),
    "negative weights": (MethodError, planned(lambda b: Terms(weight=like(b, -1)))),
    "NaN weights": (MethodError, planned(lambda b: Terms(weight=like(b, NAN)))),
    "infinite weights": (MethodError, planned(lambda b: Terms(weight=like(b, INF)))),
    "a NaN bonus": (MethodError, planned(lambda b: Terms(bonus=torch.where(b.position == 0, NAN, like(b, 1))))),
    "an infinite bonus": (MethodError, planned(lambda b: Terms(bonus=like(b, -INF)))),
    "negative bounds of tokens": (MethodError, planned(lambda b: Terms(bounds=Bounds(like(b, -0.1), like(b, 0.2))))),
    "NaN bounds of tokens": (MethodError, planned(lambda b: Terms(bounds=Bounds(0.2, like(b, NAN))))),
    "a float in report": (MethodError, planned(lambda b: Terms(report={"share": 0.5}))),
    "a tensor in report": (MethodError, planned(lambda b: Terms(report={"share": b.advantages}))),
    "report that is no mapping": (MethodError, planned(lambda b: Terms(report=mean(b)))),
    "a gate that is a function": (MethodError, planned(lambda b: Terms(gates={"": lambda ratio, constants: ratio}))),
    "a gate without a name": (MethodError, planned(lambda b: Terms(gates=Gate(lambda ratio, constants: ratio)))),
    "a gate of a number": (MethodError, planned(lambda b: Terms(gates={"": Gate(0.5)}))),
    "a gate, where of floats": (MethodError, planned(lambda b: Terms(gates={"": Gate(abs, where=b.advantages)}))),
    "a penalty that is a pair": (MethodError, planned(lambda b: Terms(penalties={"": (0.1, abs)}))),
    "a penalty without a name": (MethodError, planned(lambda b: Terms(penalties=Penalty(0.1, abs)))),
    "a penalty of a tensor": (MethodError, planned(lambda b: Terms(penalties={"": Penalty(0.1, b.advantages)}))),
    "a penalty with a NaN coefficient": (MethodError, planned(lambda b: Terms(penalties={"": Penalty(NAN, abs)}))),
    "a penalty with a tensor for a coefficient": (
        MethodError,
        planned(lambda b: Terms(penalties={"": Penalty(torch.ones(()), abs)})),
    ),
    "a penalty, where of sequences": (
        MethodError,
        planned(lambda b: Terms(penalties={"": Penalty(0.1, abs, where=b.sequence_ids >= 0)})),
    ),
    "a penalty, reads as text": (
        MethodError,
        planned(lambda b: Terms(penalties={"": Penalty(0.1, abs, reads="entropies")})),
    ),
    "a penalty, reads misspelt": (
        MethodError,
        planned(lambda b: Terms(penalties={"": Penalty(0.1, abs, reads={"entropy"})})),
    ),
    "bounds as a pair": (MethodError, planned(lambda b: Terms(bounds=(0.2, 0.28)))),
    "bounds negative": (MethodError, planned(lambda b: Terms(bounds=Bounds(-0.2, 0.28)))),
    "bounds of ints": (MethodError, planned(lambda b: Terms(bounds=Bounds(like(b, 1).long(), 0.28)))),
    "bounds, dual below 1": (MethodError, planned(lambda b: Terms(bounds=Bounds(0.2, 0.28, 0.5)))),
    "a ratio of a tensor": (MethodError, planned(lambda b: Terms(ratio=b.advantages))),
    "an aggregate by name": (MethodError, planned(lambda b: Terms(aggregate="token_mean"))),
    "lr_scale negative": (MethodError, planned(lambda b: Terms(lr_scale=-0.5))),
    "lr_scale NaN": (MethodError, planned(lambda b: Terms(lr_scale=NAN))),
    "lr_scale a tensor": (MethodError, planned(lambda b: Terms(lr_scale=torch.ones(())))),
    "lr_scale of the batch": (MethodError, planned(lambda b: Terms(lr_scale=1 / (1 + len(b))))),
}
FUNCTIONS = {
    "a gate that returns a column": (
        MethodError,
        lost(lambda b: Terms(gates={"soft": Gate(lambda ratio, constants: ratio[:, None])})),
    ),
    "a gate that returns a number": (
        MethodError,
        lost(lambda b: Terms(gates={"": Gate(lambda ratio, constants: 0.5)})),
    ),
    "a gate that returns None": (MethodError, lost(lambda b: Terms(gates={"": Gate(lambda ratio, constants: None)}))),
    "a penalty whose name has a slash": (
        MethodError,
        planned(lambda b: Terms(penalties={"b/c": Penalty(0.1, lambda policy, anchor: policy.logprobs)})),
    ),
    "a metric without a name": (MethodError, planned(lambda b: Terms(report={"": Mean.scalar(1.0)}))),
    "a metric named as the one of its gate": (
        MethodError,
        planned(
            lambda b: Terms(gates={"": Gate(lambda ratio, constants: ratio)}, report={"stopped": Mean.scalar(1.0)})
        ),
    ),
    "a metric named as the one of its penalty": (
        MethodError,
        planned(
            lambda b: Terms(
                penalties={"": Penalty(0.1, lambda policy, anchor: policy.logprobs)}, report={"value": Mean.scalar(1.0)}
            )
        ),
    ),
    "a metric named as one of what is observed": (
        MethodError,
        planned(lambda b: Terms(report={"would_drop": Mean.scalar(1.0)})),
    ),
    "a gate named as an observed clip": (
        MethodError,
        planned(lambda b: Terms(gates={"clip": Gate(lambda ratio, constants: ratio)})),
    ),
    "a pull that returns a number": (
        MethodError,
        lost(lambda b: Terms(surrogate=Surrogate(lambda ratio, constants: 0.5))),
    ),
    "a pull that is a function": (MethodError, lost(lambda b: Terms(surrogate=lambda ratio, constants: ratio))),
    "a penalty that returns a mean": (
        MethodError,
        lost(lambda b: Terms(penalties={"kl": Penalty(0.1, lambda policy, anchor: policy.logprobs.mean())})),
    ),
    "a penalty that returns a number": (
        MethodError,
        lost(lambda b: Terms(penalties={"kl": Penalty(0.1, lambda policy, anchor: 1.0)})),
    ),
    "a penalty of constants": (
        MissingSignal,
        lost(lambda b: Terms(penalties={"kl": Penalty(0.1, lambda policy, anchor: anchor.logprobs)})),
    ),
    "a ratio that returns sequences": (
        MethodError,
        lost(lambda b: Terms(ratio=lambda policy, held: b.sequence_mean(policy.logprobs))),
    ),
    "an aggregate that returns a number": (
        MethodError,
        lost(lambda b: Terms(aggregate=lambda sequence, counted, num_sequences, totals: 1 / totals.tokens)),
    ),
}
FITS = {
    "excludes": (Conflict, lambda: compose(excluding(excludes={"s2t": "both mask."}), S2TMask())),
    "excludes, from the other side": (Conflict, lambda: compose(S2TMask(), excluding(excludes={"s2t": "both mask."}))),
    "excludes, inside within": (
        Conflict,
        lambda: compose(excluding(excludes={"kl": "one is enough."}), within(S2TMask(), KLPenalty())),
    ),
    "excludes, the two parts of within": (
        Conflict,
        lambda: within(S2TMask(), excluding(excludes={"s2t": "both mask."})),
    ),
    "excludes, itself": (Conflict, lambda: compose(excluding(excludes={"mine": "one is enough."}), a_class()())),
    "excludes, a preset": (
        Conflict,
        lambda: compose(excluding(excludes={"s2t": "both mask."}), preset("stapo").objective),
    ),
    "requires a method": (
        Conflict,
        lambda: make_plan(compose(excluding(requires={"s2t": "it counts what is left."})), []),
    ),
    "requires a field": (Conflict, lambda: make_plan(compose(excluding(requires={"bounds": "it scales them."})), [])),
    "requires, observed only": (
        Conflict,
        lambda: make_plan(compose(excluding(requires={"s2t": "it counts what is left."}), observe(S2TMask())), []),
    ),
    "requires a field, observed only": (
        Conflict,
        lambda: make_plan(compose(excluding(requires={"gates": "it scales them."}), observe(ClipHigher())), []),
    ),
}
STEPS = {
    "scope misspelt": (OutOfRange, lambda: make_plan(compose(), [], scope="micro")),
    "one batch for the parts": (OutOfRange, lambda: make_plan(compose(), batch_of(ROWS))),
    "a part that is no batch": (OutOfRange, lambda: make_plan(compose(), [{"advantages": 1}])),
    "a batch of another plan": (OutOfRange, lambda: make_plan(compose(), [batch_of(ROWS)]).part(batch_of(ROWS))),
    "a part beyond the last": (OutOfRange, lambda: make_plan(compose(), [batch_of(ROWS)]).part(1)),
    "a part that is a policy": (
        OutOfRange,
        lambda: make_plan(compose(), [batch_of(ROWS)]).part(PolicyOutputs(torch.ones(2))),
    ),
    "a tensor for the policy": (OutOfRange, whole(policy=lambda live: live.logprobs)),
    "a policy of other tokens": (ShapeError, whole(policy=lambda live: live.select(torch.tensor([0])))),
    "a policy as padded": (ShapeError, whole(policy=lambda live: PolicyOutputs(torch.zeros(2, 3)))),
    "a policy that was detached": (MissingSignal, whole(policy=lambda live: live.constant())),
    "a policy on another device": (ShapeError, whole(policy=lambda live: PolicyOutputs(live.logprobs.to("meta")))),
    "entropies of other tokens": (ShapeError, whole(policy=lambda live: replace(live, entropies=live.entropies[:1]))),
    "log-probs that were detached": (
        MissingSignal,
        whole(policy=lambda live: replace(live, logprobs=live.logprobs.detach())),
    ),
    "entropies that were detached": (
        MissingSignal,
        whole(compose(EntropyBonus()), lambda live: replace(live, entropies=live.entropies.detach())),
    ),
    "a signal misspelt": (UnknownName, padded(entropy=torch.ones(2, 3))),
    "a setting misspelt": (UnknownName, lambda: S2TMask(max_probs=0.1)),
    "a setting of a method without any": (UnknownName, lambda: rlstab.TokenMean(share=0.1)),
    "advantages of shape (B, 1)": (ShapeError, padded(advantages=torch.ones(2, 1))),
    "advantages of a list": (OutOfRange, padded(advantages=[1.0, 1.0])),
    "a float mask with NaN": (OutOfRange, padded(response_mask=torch.tensor([[1.0, NAN, 0.0], [1.0, 1.0, 1.0]]))),
    "labels for a mask": (OutOfRange, padded(response_mask=torch.tensor([[1, 5, -100], [1, 1, 1]]))),
    "prompts included": (ShapeError, padded(old_logprobs=torch.zeros(2, 8))),
    "token ids for log-probs": (ShapeError, padded(old_logprobs=torch.ones(2, 3, dtype=torch.int64))),
    "group_ids as a list": (OutOfRange, padded(group_ids=["a", "b"])),
    "group_ids of floats": (ShapeError, padded(group_ids=torch.tensor([0.0, 0.5]))),
    "group_ids of tokens": (ShapeError, padded(group_ids=torch.ones(2, 3, dtype=torch.int64))),
    "another device": (ShapeError, padded(old_logprobs=torch.ones(2, 3, device="meta"))),
    "a signal that is not there": (MissingSignal, lambda: batch_of(ROWS).signal("mine")),
    "old_logprobs with a gradient": (
        ShapeError,
        lambda: replace(batch_of(ROWS), old_logprobs=torch.ones(5, requires_grad=True)),
    ),
}

GIVEN = {"a class": ClipHigher, "a list": [ClipHigher()], "a preset": preset("dapo"), "a name": "s2t", "None": None}
CALLS = {
    "compose": compose,
    "within": lambda given: within(given, S2TMask()),
    "observe": observe,
    "make_plan": lambda given: make_plan(given, []),
}
NOT_METHODS = {
    f"{call}: {what}": (MethodError, functools.partial(CALLS[call], GIVEN[what])) for call in CALLS for what in GIVEN
}
TABLE = {**CLASSES, **MEASURES, **STATES, **TERMS, **FUNCTIONS, **FITS, **STEPS, **NOT_METHODS}
FILE = Path(__file__).parents[1] / "errors.txt"


def told() -> str:
    """Each mistake with its error, as the file has them."""
    lines = []
    for name, (error, act) in TABLE.items():
        with pytest.raises(error) as caught:
            act()
        assert type(caught.value) is error, name
        lines.append(f"{name}\n    {error.__name__}: " + str(caught.value).replace("\n", "\n    "))
    return "\n".join(lines) + "\n"


def test_each_mistake_is_told_as_the_file_says():
    assert len(TABLE) == sum(map(len, (CLASSES, MEASURES, STATES, TERMS, FUNCTIONS, FITS, STEPS, NOT_METHODS)))
    assert told().split("\n") == FILE.read_text(encoding="utf-8").split("\n")


def misfit(key, count):
    return says(
        MethodError,
        f"'{key}' gave {count} weights, bonuses or bounds that are NaN, infinite or negative. A weight is finite and "
        f"at least 0 (to turn a token around, use bonus), a bonus is finite, and a bound is at least 0.",
    )


def test_the_culprit_is_named_where_two_negative_weights_make_a_positive_one():
    twice = compose(Scale(weight=-1.0), Scale(weight=-2.0), S2TMask())
    with misfit("scale_1", 5):
        make_plan(twice, [batch_of(ROWS)])


def test_the_culprit_is_named_inside_within():
    objective = compose(Scale(), within(DropPunished(), compose(Scale(weight=-1.0), S2TMask())))
    rows = [[{**one, "A": 1.0} for one in ROWS[0]], [{**one, "A": -1.0} for one in ROWS[1]]]
    with misfit("within/inner/scale", 3):  # it saw the three tokens of the first row
        make_plan(objective, [batch_of(rows)])


def test_every_rank_raises_and_the_one_with_the_culprit_names_it():
    objective = compose(asking(lambda b: Terms(bonus=torch.where(b.sequence_ids == 1, NAN, 0.0)[b.sequence].double())))
    comms, told = ThreadComm.of(3), {}

    def work(rank):
        parts = [batch_of([ROWS[rank]], [rank])] if rank < 2 else []
        try:
            make_plan(objective, parts, comm=comms[rank])
        except MethodError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(told) == [0, 1, 2]
    assert told[1].startswith("'mine' gave 2 weights, bonuses or bounds")
    assert (
        told[0]
        == told[2]
        == (
            "on another rank a method gave 2 weights, bonuses or bounds that no loss can take. Look at the error there."
        )
    )


def test_names_that_a_rank_without_parts_lacks_are_told_before_ranks_wait_for_each_other():
    asked = []

    class Counting(LocalComm):
        def sum(self, values):
            asked.append(values)
            return values

    method = a_class(measure=by_tokens(lambda b: {"a": mean(b)}, lambda b: {}))()
    with pytest.raises(MethodError, match="returned 'a' as a Mean on a part"):
        measure_all(method, [batch_of(ROWS)], {}, Counting())
    assert asked == []


def test_what_is_only_observed_excludes_and_requires_nothing():
    rival = a_class(excludes={"s2t": "both mask."}, requires={"kl": "why not."})()
    make_plan(compose(observe(rival), S2TMask()), [])
    make_plan(compose(a_class(excludes={"s2t": "both mask."})(), observe(S2TMask())), [])
    compose(a_class(excludes={"mine": "one is enough."})())


def test_a_gate_that_is_nan_is_counted_by_a_plan_and_raised_by_a_call():
    objective = compose(
        asking(
            lambda b: Terms(gates={"": Gate(lambda ratio, constants: torch.where(b.position == 0, NAN, ratio))}),
            writes={"gates"},
        )
    )
    batch = batch_of([[{**one, "A": 1.0} for one in row] for row in ROWS])
    policy = live_of(batch, ROWS)[0]
    assert make_plan(objective, [batch]).loss(batch, policy).nonfinite == 2
    with pytest.raises(NonFinite):
        objective(batch, policy)


def test_a_loss_that_is_only_looked_at_needs_no_gradient():
    batch = batch_of(ROWS)
    policy = live_of(batch, ROWS)[0].constant()
    with torch.no_grad():
        assert math.isfinite(compose(KLPenalty())(batch, policy).loss)
    silent = batch_of([[{**one, "A": 0.0} for one in row] for row in ROWS])
    assert make_plan(compose(), [silent]).loss(0, policy).loss == 0


class Places(TokenObjective):
    """Drop tokens at some places of a response."""

    name = "places"
    writes = {"keep"}

    at: tuple[Annotated[int, Range(ge=0)], ...] = (0,)
    shares: tuple[float, ...] | None = None

    def terms(self, batch, stat, state):
        return Terms(keep=~torch.isin(batch.position, torch.tensor(self.at)))


@pytest.fixture
def yaml(tmp_path, monkeypatch):
    """Loads an objective from the text of a file, in which the methods of these tests are known."""
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))
    monkeypatch.chdir(tmp_path)

    def load(text):
        (tmp_path / "run.yaml").write_text(text)
        return load_objective("run.yaml")

    return load


def test_a_tuple_is_a_list_in_yaml(yaml):
    register(Places)
    one = yaml("objective:\n  - {name: places, at: [1, 2], shares: [1, 0.5]}\n")
    assert one.members == (Places(at=(1, 2), shares=(1.0, 0.5)),)
    text = dump(dump_objective(one))
    assert text == "- name: places\n  at:\n  - 1\n  - 2\n  shares:\n  - 1.0\n  - 0.5\n"
    assert yaml(f"objective:\n{text}") == one
    assert objective_hash(one) == objective_hash(compose(Places(at=(1, 2), shares=(1, 0.5))))
    assert objective_hash(one) != objective_hash(compose(Places(at=(2, 1), shares=(1, 0.5))))
    schema = json_schema()["$defs"]["method.places"]["properties"]["at"]
    assert (schema["type"], schema["items"]) == ("array", {"minimum": 0, "type": "integer"})


def test_wrong_settings_and_what_does_not_fit_are_told_with_file_and_line(yaml):
    register(Places)
    register(a_class(name="loner", excludes={"s2t": "both mask."}))
    register(a_class(name="needy", requires={"bounds": "it scales them."}))
    for settings, named in {"at: 1": "at", "at: [0, -1]": "at.1", "at: ~": "at", "shares: [a]": "shares.0"}.items():
        with pytest.raises(ConfigError, match=rf"run.yaml:3: objective.0.{named}: "):
            yaml(f"objective:\n  - name: places\n    {settings}\n")
    for text, named in {
        "seed: 1\nobjective:\n  - loner\n  - s2t\n": "'loner' and 's2t'",
        "objective:\n  - {name: within, outer: s2t, inner: loner}\n": "'loner' and 's2t'",
        "seed: 1\nobjective: [needy, s2t]\n": "'needy'",
    }.items():
        with pytest.raises(Conflict, match=rf"run.yaml:2: objective(.0)?: {named}"):
            yaml(text)
    assert yaml("objective: [needy, clip_higher]\n")
    assert yaml("objective: [s2t, {name: observe, method: loner}]\n")


def test_every_error_is_of_the_tree_and_says_in_one_line_what_it_means():
    found = [one for one in vars(rlstab.errors).values() if isinstance(one, type) and issubclass(one, Exception)]
    tree = [one for one in found if not issubclass(one, Warning)]
    assert len(tree) > 10
    for one in tree:
        assert issubclass(one, rlstab.errors.RlstabError)
        assert one is rlstab.errors.RlstabError or len(one.__bases__) == 2, one
        assert re.fullmatch(r"[^\n]+\.", one.__doc__), one


if __name__ == "__main__":
    FILE.write_text(told(), encoding="utf-8")
