"""What a user does wrong is told when it happens: who, what, and the cure. Each case is one mistake.

Deliberately not checked, for it would wait for the device or cannot be told from what is right:

- a gate that is NaN or negative on some tokens: `plan.loss` counts NaN in `nonfinite`, and a whole call raises;
- weights of what is only observed, and weights whose product alone overflows;
- log-probs that are probabilities, and prompts that the response mask counts;
- sequence ids that stand twice, and those of parts that were left to be numbered;
- a part of which the loss is never taken, and a `plan.state` that nobody passes on.
"""

from __future__ import annotations

import inspect
import math
import re
import threading
from dataclasses import dataclass, replace
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
from rlstab.core import objective, stats
from rlstab.core.comm import LocalComm
from rlstab.core.method import measure_all
from rlstab.core.terms import WRITABLE
from rlstab.errors import ConfigError, Conflict, MethodError, MissingSignal, NonFinite, OutOfRange, ShapeError
from rlstab.testing import check_objective
from rlstab.testing.outcome import _Meeting, _ThreadComm
from rlstab.zoo import METHODS
from tests.core.methods import DropPunished, Scale
from tests.core.says import says
from tests.core.steps import batch_of, live_of, random_rows

ROWS = random_rows(11, [3, 2])
NAN, INF = math.nan, math.inf


def a_class(**attributes: Any) -> type[TokenObjective]:
    """A class of a method that asks for nothing; the attributes say otherwise."""
    own = {"name": "mine", "terms": lambda self, batch, stat, state: Terms(), "__module__": __name__}
    return dataclass(frozen=True)(type("Mine", (TokenObjective,), own | attributes))


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


def undecorated():
    class Plain(TokenObjective):
        name = "plain"
        share: float = 0.5

        def terms(self, batch, stat, state):
            return Terms()

    return Plain


def thawed():
    @dataclass
    class Thawed(TokenObjective):
        name = "thawed"
        share: float = 0.5

        def terms(self, batch, stat, state):
            return Terms()

    return Thawed


def inherited():
    class Inherited(Scale):
        more: float = 0.5

    return Inherited


def as_setting():
    class Annotated_(TokenObjective):
        name = "annotated"
        needs: frozenset[str] = frozenset({"entropies"})

        def terms(self, batch, stat, state):
            return Terms()

    return Annotated_


def with_setting(hint, default):
    """Make a method that has a setting of this type."""
    return lambda: a_class(__annotations__={"chosen": hint}, chosen=default)()


def careless():
    """A ``__post_init__`` that does not call the one of TokenObjective."""
    return a_class(
        __annotations__={"share": Annotated[float, Range(gt=0, le=1)]}, share=0.5, __post_init__=lambda self: None
    )(share=2.0)


class OwnInit(Scale):
    def __init__(self) -> None:
        pass


def by_tokens(one, other):
    return lambda self, batch, *stat: one(batch) if len(batch) else other(batch)


def mean(batch):
    return Mean.of(batch.advantages)


CLASSES = {
    "a name with a slash": (
        lambda: a_class(name="a/b"),
        MethodError,
        "Mine is named 'a/b', expected letters, digits and underscores: it is a part of the names of metrics. Give the "
        "class another `name`.",
    ),
    "a name with an escape sequence": (
        lambda: a_class(name="\x1b[31mred"),
        MethodError,
        "Mine is named '\\x1b[31mred', expected letters, digits and underscores: it is a part of the names of metrics. "
        "Give the class another `name`.",
    ),
    "a name that metrics have": (
        lambda: a_class(name="tokens"),
        MethodError,
        "Mine is named 'tokens', as metrics of the loss or the trainer are. Give the class another `name`.",
    ),
    "no name": (
        lambda: a_class(name=None),
        MethodError,
        "Mine has no name. Add a line such as: name: ClassVar[str] = 'my_method'.",
    ),
    "empty name": (
        lambda: a_class(name=""),
        MethodError,
        "Mine has no name. Add a line such as: name: ClassVar[str] = 'my_method'.",
    ),
    "name of a combinator": (
        lambda: a_class(name="within"),
        MethodError,
        "Mine is named 'within', as a combinator is. Give the class another `name`.",
    ),
    "needs as text": (
        lambda: a_class(needs="entropies"),
        MethodError,
        "Mine: needs = 'entropies', expected a set of names. Write needs = frozenset({'entropies'}).",
    ),
    "needs as a list": (
        lambda: a_class(needs=["entropies", "ref_logprobs"]),
        MethodError,
        "Mine: needs = ['entropies', 'ref_logprobs'], expected a set of names. Write needs = "
        "frozenset({'entropies', 'ref_logprobs'}).",
    ),
    "writes as a list": (
        lambda: a_class(writes=["keep"]),
        MethodError,
        "Mine: writes = ['keep'], expected a set of names. Write writes = frozenset({'keep'}).",
    ),
    "writes as a number": (
        lambda: a_class(writes=3),
        MethodError,
        "Mine: writes = 3, expected a set of names. Write writes = frozenset({'keep'}).",
    ),
    "writes misspelt": (
        lambda: a_class(writes=frozenset({"wieght"})),
        MethodError,
        "Mine: writes names 'wieght', which does not exist. Did you mean 'weight'?",
    ),
    "writes a surrogate": (
        lambda: a_class(writes=frozenset({"surrogate"})),
        MethodError,
        "Mine: writes names 'surrogate', which does not exist. A surrogate is written as a gate: see Gate.",
    ),
    "live needs of the evidence": (
        lambda: a_class(live_needs=frozenset({"ref_logprobs"})),
        MethodError,
        "Mine: live_needs names 'ref_logprobs', which does not exist. Known: entropies, log_kept_mass.",
    ),
    "drift misspelt": (
        lambda: a_class(reads_drift=frozenset({"samplr"})),
        MethodError,
        "Mine: reads_drift names 'samplr', which does not exist. Did you mean 'sampler'?",
    ),
    "a property that returns text": (
        lambda: compose(a_class(needs=property(lambda self: "entropies"))()),
        MethodError,
        "Mine: needs = 'entropies', expected a set of names. Write needs = frozenset({'entropies'}).",
    ),
    "excludes as a set": (
        lambda: a_class(excludes={"kl"}),
        MethodError,
        "Mine: excludes = {'kl'}, expected reasons by name. Write excludes = {'name': 'why'}.",
    ),
    "requires without a reason": (
        lambda: a_class(requires={"bounds": None}),
        MethodError,
        "Mine: requires = {'bounds': None}, expected reasons by name. Write requires = {'name': 'why'}.",
    ),
    "no dataclass": (
        lambda: undecorated()(),
        MethodError,
        "undecorated.<locals>.Plain is no dataclass, so it has no settings. Write @dataclass(frozen=True) above "
        "the class.",
    ),
    "no dataclass, with a setting": (
        lambda: undecorated()(share=0.3),
        MethodError,
        "undecorated.<locals>.Plain is no dataclass, so it has no settings. Write @dataclass(frozen=True) above "
        "the class.",
    ),
    "no dataclass, with an init": (
        lambda: compose(OwnInit()) and register(undecorated()),
        MethodError,
        "undecorated.<locals>.Plain is no dataclass, so it has no settings. Write @dataclass(frozen=True) above "
        "the class.",
    ),
    "not frozen": (
        lambda: thawed()(),
        MethodError,
        "thawed.<locals>.Thawed is not frozen: its settings could change after they were checked, and after a run"
        " was named by them. Write @dataclass(frozen=True) above the class.",
    ),
    "setting of a subclass without dataclass": (
        lambda: inherited()(),
        MethodError,
        "inherited.<locals>.Inherited is no dataclass of its own, so `more` is no setting. Write "
        "@dataclass(frozen=True) above the class.",
    ),
    "needs with an annotation": (
        lambda: as_setting()(),
        MethodError,
        "as_setting.<locals>.Annotated_ annotates `needs`, which makes a setting of it. Write `needs = ...` "
        "without an annotation, or with ClassVar.",
    ),
    "post init without super": (
        careless,
        OutOfRange,
        "'mine': share = 2.0, expected float in (0, 1]. The default is 0.5.",
    ),
    "setting of type dict": (
        with_setting(dict, None),
        MethodError,
        "Mine: the setting 'chosen' has the type dict, which YAML cannot hold. Use bool, int, float, str, Literal"
        " or tuple[T, ...], each perhaps with | None.",
    ),
    "setting of type list": (
        with_setting(list[int], None),
        MethodError,
        "Mine: the setting 'chosen' has the type list[int], which YAML cannot hold. Use bool, int, float, str, "
        "Literal or tuple[T, ...], each perhaps with | None.",
    ),
    "range on a tuple": (
        with_setting(Annotated[tuple[int, ...], Range(ge=1)], (1,)),
        MethodError,
        "Mine: the setting 'chosen' has a Range and is no number. Put the Range on numbers, for example "
        "tuple[Annotated[int, Range(ge=1)], ...].",
    ),
    "annotation that nobody knows": (
        with_setting("Unheard", None),
        MethodError,
        "Mine: an annotation cannot be read, for name 'Unheard' is not defined. Import or define it at the top of"
        " the module, not inside a function.",
    ),
    "item out of range": (
        with_setting(tuple[Annotated[int, Range(ge=1)], ...], (1, 0)),
        OutOfRange,
        "'mine': chosen = (1, 0), expected tuple of int in [1, inf). The default is (1, 0).",
    ),
    "item of another type": (
        with_setting(tuple[int, ...] | None, (1, 0.5)),
        OutOfRange,
        "'mine': chosen = (1, 0.5), expected tuple of int or None. The default is (1, 0.5).",
    ),
    "list for a tuple": (
        lambda: a_class(__annotations__={"chosen": tuple[int, ...]}, chosen=(1,))(chosen=[1]),
        OutOfRange,
        "'mine': chosen = [1], expected tuple of int. The default is (1,).",
    ),
    "register an object": (
        lambda: register(ClipHigher()),
        MethodError,
        "register was given a ClipHigher. Pass the class of a method: register(MyMethod).",
    ),
    "register what is no method": (
        lambda: register(int),
        MethodError,
        "register was given a type. Pass the class of a method: register(MyMethod).",
    ),
}
MEASURES = {
    "measure returns a tensor": (
        measured(measure=lambda self, batch: batch.advantages),
        MethodError,
        "'mine': measure returned a Tensor, expected summaries by name. Return for example {'entropy': "
        "Mean.of(values)}, or NOTHING.",
    ),
    "measure returns None": (
        measured(measure=lambda self, batch: None),
        MethodError,
        "'mine': measure returned None, expected summaries by name. Return for example {'entropy': "
        "Mean.of(values)}, or NOTHING.",
    ),
    "measure returns a dict with a tensor": (
        measured(measure=lambda self, batch: {"a": batch.advantages.sum()}),
        MethodError,
        "'mine': measure returned a Tensor under 'a', which cannot be merged over parts. Wrap it: Mean.of, "
        "Pool.top, Pool.quantile or Grouped.of.",
    ),
    "measure returns a dict with a float": (
        measured(measure=lambda self, batch: {"a": 0.5}),
        MethodError,
        "'mine': measure returned a float under 'a', which cannot be merged over parts. Wrap it: Mean.of, "
        "Pool.top, Pool.quantile or Grouped.of.",
    ),
    "measure returns a key that is no text": (
        measured(measure=lambda self, batch: {0: mean(batch)}),
        MethodError,
        "'mine': measure returned a summary under 0, which is no name. Give it a text for a name.",
    ),
    "measure_again returns a tensor": (
        measured(measure_again=lambda self, batch, stat: batch.advantages),
        MethodError,
        "'mine': measure_again returned a Tensor, expected summaries by name. Return for example {'entropy': "
        "Mean.of(values)}, or NOTHING.",
    ),
    "measure_again returns None": (
        measured(measure_again=lambda self, batch, stat: None),
        MethodError,
        "'mine': measure_again returned None, expected summaries by name. Return for example {'entropy': "
        "Mean.of(values)}, or NOTHING.",
    ),
    "measure_again returns an int": (
        measured(measure_again=lambda self, batch, stat: {"a": 1}),
        MethodError,
        "'mine': measure_again returned an int under 'a', which cannot be merged over parts. Wrap it: Mean.of, "
        "Pool.top, Pool.quantile or Grouped.of.",
    ),
    "names differ between parts": (
        measured(measure=lambda self, batch: {"ab"[len(batch) == 2]: mean(batch)}),
        MethodError,
        "'mine': measure returned no 'a' on a part of the optimizer step, and 'a' as a Mean on one without "
        "tokens, which a rank may have. Return the same summaries on every part, empty ones where there is "
        "nothing.",
    ),
    "names differ without tokens": (
        measured(measure=by_tokens(lambda b: {"a": mean(b)}, lambda b: NOTHING)),
        MethodError,
        "'mine': measure returned 'a' as a Mean on a part of the optimizer step, and no 'a' on one without "
        "tokens, which a rank may have. Return the same summaries on every part, empty ones where there is "
        "nothing.",
    ),
    "names differ without tokens, again": (
        measured(measure_again=by_tokens(lambda b: {"a": mean(b)}, lambda b: {"a": mean(b), "b": mean(b)})),
        MethodError,
        "'mine': measure_again returned no 'b' on a part of the optimizer step, and 'b' as a Mean on one without "
        "tokens, which a rank may have. Return the same summaries on every part, empty ones where there is "
        "nothing.",
    ),
    "kinds differ without tokens": (
        measured(measure=by_tokens(lambda b: {"a": mean(b)}, lambda b: {"a": Pool.top(b.advantages, 0.5)})),
        MethodError,
        "'mine': measure returned 'a' as a Mean on a part of the optimizer step, and 'a' as a Pool(ceil, 0.5) on "
        "one without tokens, which a rank may have. Return the same summaries on every part, empty ones where "
        "there is nothing.",
    ),
    "levels differ between parts": (
        measured(measure=lambda self, batch: {"a": Pool.top(batch.advantages, 1 / (1 + len(batch)))}),
        MethodError,
        "'mine': measure returned 'a' as a Pool(ceil, 0.25) on a part of the optimizer step, and 'a' as a "
        "Pool(ceil, 1.0) on one without tokens, which a rank may have. Return the same summaries on every part, "
        "empty ones where there is nothing.",
    ),
    "measure fails without tokens": (
        measured(measure=lambda self, batch: {"a": Mean.scalar(float(batch.advantages.max()))}),
        MethodError,
        "'mine': measure failed on a batch without tokens, which a rank may have: RuntimeError: max(): Expected "
        "reduction dim to be specified for input.numel() == 0. Specify the reduction dim with the 'dim' argument."
        " Return empty summaries, such as Mean.of of no values.",
    ),
    "a name in both rounds": (
        measured(
            measure=lambda self, batch: {"a": mean(batch)}, measure_again=lambda self, batch, stat: {"a": mean(batch)}
        ),
        MethodError,
        "'mine': measure and measure_again both returned 'a', and `advance` and `terms` see only one. Give the "
        "second another name.",
    ),
    "a statistic that nobody measured": (
        measured(
            measure=lambda self, batch: {"entropy": mean(batch)}, advance=lambda self, state, stat: stat.mean("entropi")
        ),
        MissingSignal,
        "the statistic 'entropi' was read, and nothing of this name was measured. Did you mean 'entropy'?",
    ),
    "a pool read as a mean": (
        measured(
            measure=lambda self, batch: {"a": Pool.top(batch.advantages, 0.5)},
            advance=lambda self, state, stat: stat.mean("a"),
        ),
        MethodError,
        "the statistic 'a' was read as a Mean, and it is a Threshold. Read it by `stat.mean`, `stat.threshold` or"
        " `stat.grouped`, as it was measured.",
    ),
    "a quantile in percent": (
        measured(measure=lambda self, batch: {"a": Pool.quantile(batch.advantages, 75)}),
        OutOfRange,
        "Pool.quantile: q = 75, expected a number in [0, 1]. Divide a percentage by 100.",
    ),
    "a share of nothing": (
        measured(measure=lambda self, batch: {"a": Pool.top(batch.advantages, 0.0)}),
        OutOfRange,
        "Pool.top: share = 0.0, expected a number in (0, 1]. Divide a percentage by 100.",
    ),
}
STATES = {
    "init_state returns None": (
        stated(init_state=lambda self: None),
        MethodError,
        "'mine': init_state returned None. Return the state, a dict, perhaps empty.",
    ),
    "advance returns None": (
        stated(init_state=lambda self: {"k": 0}, advance=lambda self, state, stat: None),
        MethodError,
        "'mine': advance returned None. Return the state, a dict, perhaps empty.",
    ),
    "advance drops a key": (
        stated(init_state=lambda self: {"k": 0, "l": 0}, advance=lambda self, state, stat: {"l": 1}),
        MethodError,
        "'mine': advance dropped 'k' from the state, and a state keeps the keys of init_state. Return {**state, ...}.",
    ),
    "advance adds a key": (
        stated(advance=lambda self, state, stat: {"k": 1}),
        MethodError,
        "'mine': advance added 'k' to the state, and a state keeps the keys of init_state. Give it a first value "
        "in init_state.",
    ),
    "a state that is none": (
        lambda: make_plan(compose(STARE()), [batch_of(ROWS)], 5),
        OutOfRange,
        "the state is an int, expected a mapping. Begin with objective.init_state().",
    ),
    "a state of a member": (
        lambda: make_plan(compose(STARE()), [batch_of(ROWS)], STARE().init_state()),
        OutOfRange,
        "the state lacks 'stare': it is of another objective, or of other settings. It has: boost, damp, gate, "
        "next_boost, next_damp. Begin with objective.init_state().",
    ),
    "a state of a smaller composition": (
        lambda: make_plan(compose(STARE(), S2TMask()), [batch_of(ROWS)], compose(S2TMask()).init_state()),
        OutOfRange,
        "the state lacks 'stare': it is of another objective, or of other settings. It has: s2t. Begin with "
        "objective.init_state().",
    ),
    "a state of a larger composition": (
        lambda: make_plan(compose(S2TMask()), [batch_of(ROWS)], compose(STARE(), S2TMask()).init_state()),
        OutOfRange,
        "the state has 'stare', which this objective does not know: it is of another objective. It knows: s2t. "
        "Begin with objective.init_state().",
    ),
    "a state of another method of that key": (
        lambda: make_plan(compose(STARE()), [batch_of(ROWS)], {"stare": {"gate": True}}),
        OutOfRange,
        "the state['stare'] lacks 'boost': it is of another objective, or of other settings. It has: gate. Begin "
        "with objective.init_state().",
    ),
    "no state where one is needed": (
        whole(compose(STARE())),
        OutOfRange,
        "'stare' has state, and the objective was called without state=. Begin with state = "
        "objective.init_state(); in each optimizer step write out = objective(batch, policy, state=state), then "
        "state = out.state, and multiply the learning rate by out.lr_scale.",
    ),
}
TERMS = {
    "terms returns None": (
        planned(lambda b: None),
        MethodError,
        "'mine': terms returned None. Return Terms(...), or Terms() to ask for nothing.",
    ),
    "fields that were not declared": (
        planned(lambda b: Terms(weight=like(b, 1), bonus=like(b, 1)), writes={"keep"}),
        MethodError,
        "'mine' fills bonus, weight, and `writes` names keep. Add 'bonus' to `writes`.",
    ),
    "fields of none declared": (
        planned(lambda b: Terms(weight=like(b, 1)), writes=()),
        MethodError,
        "'mine' fills weight, and `writes` names nothing. Add 'weight' to `writes`.",
    ),
    "keep of ints": (
        planned(lambda b: Terms(keep=like(b, 1).long())),
        MethodError,
        "'mine': Terms.keep is torch.int64 of shape (5,), expected bool of shape (5,). Compare, for example "
        "`weights > 0`.",
    ),
    "keep of floats": (
        planned(lambda b: Terms(keep=like(b, 1))),
        MethodError,
        "'mine': Terms.keep is torch.float64 of shape (5,), expected bool of shape (5,). Compare, for example "
        "`weights > 0`.",
    ),
    "keep of sequences": (
        planned(lambda b: Terms(keep=b.sequence_ids >= 0)),
        MethodError,
        "'mine': Terms.keep is torch.bool of shape (2,), expected bool of shape (5,). Give one value per token of"
        " the batch.",
    ),
    "keep as padded": (
        planned(lambda b: Terms(keep=b.to_padded(like(b, 1)) > 0)),
        MethodError,
        "'mine': Terms.keep is torch.bool of shape (2, 5), expected bool of shape (5,). Give one value per token "
        "of the batch.",
    ),
    "keep as a list": (
        planned(lambda b: Terms(keep=[True] * len(b))),
        MethodError,
        "'mine': Terms.keep is a list, expected a bool tensor of shape (n,), one value per token.",
    ),
    "keep on another device": (
        planned(lambda b: Terms(keep=torch.ones(len(b), dtype=torch.bool, device="meta"))),
        MethodError,
        "'mine': Terms.keep is on meta, and the batch is on cpu. Make it from the tensors of the batch, for "
        "example with torch.ones_like(batch.advantages).",
    ),
    "exempt of floats": (
        planned(lambda b: Terms(unclipped=like(b, 1))),
        MethodError,
        "'mine': Terms.unclipped is torch.float64 of shape (5,), expected bool of shape (5,). Compare, for example "
        "`weights > 0`.",
    ),
    "weight of ints": (
        planned(lambda b: Terms(weight=like(b, 1).long())),
        MethodError,
        "'mine': Terms.weight is torch.int64 of shape (5,), expected float of shape (5,). Convert it with .float().",
    ),
    "weight as a number": (
        planned(lambda b: Terms(weight=0.5)),
        MethodError,
        "'mine': Terms.weight is a float, expected a float tensor of shape (n,), one value per token.",
    ),
    "weight with a gradient": (
        planned(lambda b: Terms(weight=like(b, 1).requires_grad_())),
        MethodError,
        "'mine': Terms.weight requires grad, and a decision has none. Make it from the evidence of the batch.",
    ),
    "negative weights": (
        planned(lambda b: Terms(weight=like(b, -1))),
        MethodError,
        "'mine' gave 5 weights, bonuses or bounds that are NaN, infinite or negative. A weight is finite and at "
        "least 0 (to turn a token around, use bonus), a bonus is finite, and a bound is at least 0.",
    ),
    "NaN weights": (
        planned(lambda b: Terms(weight=like(b, NAN))),
        MethodError,
        "'mine' gave 5 weights, bonuses or bounds that are NaN, infinite or negative. A weight is finite and at "
        "least 0 (to turn a token around, use bonus), a bonus is finite, and a bound is at least 0.",
    ),
    "infinite weights": (
        planned(lambda b: Terms(weight=like(b, INF))),
        MethodError,
        "'mine' gave 5 weights, bonuses or bounds that are NaN, infinite or negative. A weight is finite and at "
        "least 0 (to turn a token around, use bonus), a bonus is finite, and a bound is at least 0.",
    ),
    "a NaN bonus": (
        planned(lambda b: Terms(bonus=torch.where(b.position == 0, NAN, like(b, 1)))),
        MethodError,
        "'mine' gave 2 weights, bonuses or bounds that are NaN, infinite or negative. A weight is finite and at "
        "least 0 (to turn a token around, use bonus), a bonus is finite, and a bound is at least 0.",
    ),
    "an infinite bonus": (
        planned(lambda b: Terms(bonus=like(b, -INF))),
        MethodError,
        "'mine' gave 5 weights, bonuses or bounds that are NaN, infinite or negative. A weight is finite and at "
        "least 0 (to turn a token around, use bonus), a bonus is finite, and a bound is at least 0.",
    ),
    "negative bounds of tokens": (
        planned(lambda b: Terms(bounds=Bounds(like(b, -0.1), like(b, 0.2)))),
        MethodError,
        "'mine' gave 5 weights, bonuses or bounds that are NaN, infinite or negative. A weight is finite and at "
        "least 0 (to turn a token around, use bonus), a bonus is finite, and a bound is at least 0.",
    ),
    "NaN bounds of tokens": (
        planned(lambda b: Terms(bounds=Bounds(0.2, like(b, NAN)))),
        MethodError,
        "'mine' gave 5 weights, bonuses or bounds that are NaN, infinite or negative. A weight is finite and at "
        "least 0 (to turn a token around, use bonus), a bonus is finite, and a bound is at least 0.",
    ),
    "a float in report": (
        planned(lambda b: Terms(report={"share": 0.5})),
        MethodError,
        "'mine': the metric 'share' is a float, which cannot be merged over parts. Write Mean.scalar(number), or "
        "Mean.of(values).",
    ),
    "a tensor in report": (
        planned(lambda b: Terms(report={"share": b.advantages})),
        MethodError,
        "'mine': the metric 'share' is a Tensor, which cannot be merged over parts. Write Mean.scalar(number), or"
        " Mean.of(values).",
    ),
    "report that is no mapping": (
        planned(lambda b: Terms(report=mean(b))),
        MethodError,
        "'mine': Terms.report is a Mean, expected a mapping by name. Write {'name': Mean.of(values)}.",
    ),
    "a gate that is a function": (
        planned(lambda b: Terms(gates={"": lambda ratio, constants: ratio})),
        MethodError,
        "'mine': the gate is a function. Write Gate(function).",
    ),
    "a gate without a name": (
        planned(lambda b: Terms(gates=Gate(lambda ratio, constants: ratio))),
        MethodError,
        "'mine': Terms.gates is a Gate, expected a mapping by name. Write {'name': Gate(function)}.",
    ),
    "a gate of a number": (
        planned(lambda b: Terms(gates={"": Gate(0.5)})),
        MethodError,
        "'mine': the gate is a float, expected a function. Pass one (ratio, constants) -> (n,).",
    ),
    "a gate, where of floats": (
        planned(lambda b: Terms(gates={"": Gate(abs, where=b.advantages)})),
        MethodError,
        "'mine': the gate has a `where` that is torch.float64 of shape (5,), expected bool of shape (5,). "
        "Compare, for example `weights > 0`.",
    ),
    "a penalty that is a pair": (
        planned(lambda b: Terms(penalties={"": (0.1, abs)})),
        MethodError,
        "'mine': the penalty is a tuple. Write Penalty(coefficient, function).",
    ),
    "a penalty without a name": (
        planned(lambda b: Terms(penalties=Penalty(0.1, abs))),
        MethodError,
        "'mine': Terms.penalties is a Penalty, expected a mapping by name. Write {'name': Penalty(...)}.",
    ),
    "a penalty of a tensor": (
        planned(lambda b: Terms(penalties={"": Penalty(0.1, b.advantages)})),
        MethodError,
        "'mine': the penalty is a Tensor, expected a function. Pass one (policy, anchor) -> (n,).",
    ),
    "a penalty with a NaN coefficient": (
        planned(lambda b: Terms(penalties={"": Penalty(NAN, abs)})),
        MethodError,
        "'mine': the penalty has the coefficient nan, expected a finite number.",
    ),
    "a penalty with a tensor for a coefficient": (
        planned(lambda b: Terms(penalties={"": Penalty(torch.ones(()), abs)})),
        MethodError,
        "'mine': the penalty has the coefficient tensor(1.), expected a finite number.",
    ),
    "a penalty, where of sequences": (
        planned(lambda b: Terms(penalties={"": Penalty(0.1, abs, where=b.sequence_ids >= 0)})),
        MethodError,
        "'mine': the penalty has a `where` that is torch.bool of shape (2,), expected bool of shape (5,). Give "
        "one value per token of the batch.",
    ),
    "a penalty, reads as text": (
        planned(lambda b: Terms(penalties={"": Penalty(0.1, abs, reads="entropies")})),
        MethodError,
        "'mine': the penalty has `reads` that is a str, expected a set of names. Write {'entropies'}.",
    ),
    "a penalty, reads misspelt": (
        planned(lambda b: Terms(penalties={"": Penalty(0.1, abs, reads={"entropy"})})),
        MethodError,
        "'mine': the penalty reads the live 'entropy', which does not exist. Did you mean 'entropies'?",
    ),
    "bounds as a pair": (
        planned(lambda b: Terms(bounds=(0.2, 0.28))),
        MethodError,
        "'mine': Terms.bounds is a tuple. Write Bounds(low, high).",
    ),
    "bounds negative": (
        planned(lambda b: Terms(bounds=Bounds(-0.2, 0.28))),
        MethodError,
        "'mine': Terms.bounds.low is -0.2, expected a number of at least 0, or one per token.",
    ),
    "bounds of ints": (
        planned(lambda b: Terms(bounds=Bounds(like(b, 1).long(), 0.28))),
        MethodError,
        "'mine': Terms.bounds.low is torch.int64 of shape (5,), expected float of shape (5,). Convert it with "
        ".float().",
    ),
    "bounds, dual below 1": (
        planned(lambda b: Terms(bounds=Bounds(0.2, 0.28, 0.5))),
        MethodError,
        "'mine': Terms.bounds.dual is 0.5, expected a number above 1, or None.",
    ),
    "a ratio of a tensor": (
        planned(lambda b: Terms(ratio=b.advantages)),
        MethodError,
        "'mine': Terms.ratio is a Tensor, expected a function. Pass one (policy, constants) -> (n,).",
    ),
    "an aggregate by name": (
        planned(lambda b: Terms(aggregate="token_mean")),
        MethodError,
        "'mine': Terms.aggregate is a str, expected a function. Pass one (sequence, counted, num_sequences, "
        "totals) -> (n,).",
    ),
    "lr_scale negative": (
        planned(lambda b: Terms(lr_scale=-0.5)),
        MethodError,
        "'mine': Terms.lr_scale is -0.5, expected a number of at least 0.",
    ),
    "lr_scale NaN": (
        planned(lambda b: Terms(lr_scale=NAN)),
        MethodError,
        "'mine': Terms.lr_scale is nan, expected a number of at least 0.",
    ),
    "lr_scale a tensor": (
        planned(lambda b: Terms(lr_scale=torch.ones(()))),
        MethodError,
        "'mine': Terms.lr_scale is tensor(1.), expected a number of at least 0.",
    ),
    "lr_scale of the batch": (
        planned(lambda b: Terms(lr_scale=1 / (1 + len(b)))),
        MethodError,
        "'mine': Terms.lr_scale is 0.16666666666666666 on a part of the optimizer step and 1.0 on one without "
        "tokens, and ranks would train at different learning rates. Make it from the statistics or the state, not"
        " from the batch.",
    ),
}
FUNCTIONS = {
    "a gate that returns a column": (
        lost(lambda b: Terms(gates={"soft": Gate(lambda ratio, constants: ratio[:, None])})),
        MethodError,
        "'mine': the gate 'soft' returned a tensor of shape (5, 1) for 5 tokens. Return one value per token, "
        "shape (n,).",
    ),
    "a gate that returns a number": (
        lost(lambda b: Terms(gates={"": Gate(lambda ratio, constants: 0.5)})),
        MethodError,
        "'mine': the gate returned a float. Return a tensor of shape (n,), one value per token.",
    ),
    "a gate that returns None": (
        lost(lambda b: Terms(gates={"": Gate(lambda ratio, constants: None)})),
        MethodError,
        "'mine': the gate returned None. Return a tensor of shape (n,), one value per token.",
    ),
    "a penalty whose name has a slash": (
        planned(lambda b: Terms(penalties={"b/c": Penalty(0.1, lambda policy, anchor: policy.logprobs)})),
        MethodError,
        "'mine': a penalty is named 'b/c', expected letters, digits and underscores. Give it another name.",
    ),
    "a metric without a name": (
        planned(lambda b: Terms(report={"": Mean.scalar(1.0)})),
        MethodError,
        "'mine': a metric is named '', expected letters, digits and underscores. Give it another name.",
    ),
    "a metric named as the one of its gate": (
        planned(
            lambda b: Terms(gates={"": Gate(lambda ratio, constants: ratio)}, report={"stopped": Mean.scalar(1.0)})
        ),
        MethodError,
        "'mine': the metric 'stopped' has a name that rlstab gives to one of its own. Give it another name.",
    ),
    "a metric named as the one of its penalty": (
        planned(
            lambda b: Terms(
                penalties={"": Penalty(0.1, lambda policy, anchor: policy.logprobs)}, report={"value": Mean.scalar(1.0)}
            )
        ),
        MethodError,
        "'mine': the metric 'value' has a name that rlstab gives to one of its own. Give it another name.",
    ),
    "a metric named as one of what is observed": (
        planned(lambda b: Terms(report={"would_drop": Mean.scalar(1.0)})),
        MethodError,
        "'mine': the metric 'would_drop' has a name that rlstab gives to one of its own. Give it another name.",
    ),
    "a gate named as an observed clip": (
        planned(lambda b: Terms(gates={"clip": Gate(lambda ratio, constants: ratio)})),
        MethodError,
        "'mine': the gate 'clip' has a name that rlstab gives to one of its own. Give it another name.",
    ),
    "a pull that returns a number": (
        lost(lambda b: Terms(surrogate=Surrogate(lambda ratio, constants: 0.5))),
        MethodError,
        "'mine': Terms.surrogate returned a float. Return a tensor of shape (n,), one value per token.",
    ),
    "a pull that is a function": (
        lost(lambda b: Terms(surrogate=lambda ratio, constants: ratio)),
        MethodError,
        "'mine': Terms.surrogate is a function. Write Surrogate(function).",
    ),
    "a penalty that returns a mean": (
        lost(lambda b: Terms(penalties={"kl": Penalty(0.1, lambda policy, anchor: policy.logprobs.mean())})),
        MethodError,
        "'mine': the penalty 'kl' returned a tensor of shape () for 5 tokens. Return one value per token, shape (n,).",
    ),
    "a penalty that returns a number": (
        lost(lambda b: Terms(penalties={"kl": Penalty(0.1, lambda policy, anchor: 1.0)})),
        MethodError,
        "'mine': the penalty 'kl' returned a float. Return a tensor of shape (n,), one value per token.",
    ),
    "a penalty of constants": (
        lost(lambda b: Terms(penalties={"kl": Penalty(0.1, lambda policy, anchor: anchor.logprobs)})),
        MissingSignal,
        "the penalty 'mine/kl' has no gradient: it reads nothing of the live policy that requires grad. Pass live"
        " log-probs that were not detached, and let it read `policy`, not `anchor`.",
    ),
    "a ratio that returns sequences": (
        lost(lambda b: Terms(ratio=lambda policy, held: b.sequence_mean(policy.logprobs))),
        MethodError,
        "'mine': Terms.ratio returned a tensor of shape (2,) for 5 tokens. Return one value per token, shape (n,).",
    ),
    "an aggregate that returns a number": (
        lost(lambda b: Terms(aggregate=lambda sequence, counted, num_sequences, totals: 1 / totals.tokens)),
        MethodError,
        "'mine': Terms.aggregate returned a float. Return a tensor of shape (n,), one value per token.",
    ),
}


def excluding(**attributes):
    return a_class(**attributes)()


FITS = {
    "excludes": (
        lambda: compose(excluding(excludes={"s2t": "both mask."}), S2TMask()),
        Conflict,
        "'mine' and 's2t' exclude each other: both mask.\n  Remove one of them.",
    ),
    "excludes, from the other side": (
        lambda: compose(S2TMask(), excluding(excludes={"s2t": "both mask."})),
        Conflict,
        "'mine' and 's2t' exclude each other: both mask.\n  Remove one of them.",
    ),
    "excludes, inside within": (
        lambda: compose(excluding(excludes={"kl": "one is enough."}), within(S2TMask(), KLPenalty())),
        Conflict,
        "'mine' and 'kl' exclude each other: one is enough.\n  Remove one of them.",
    ),
    "excludes, the two parts of within": (
        lambda: within(S2TMask(), excluding(excludes={"s2t": "both mask."})),
        Conflict,
        "'mine' and 's2t' exclude each other: both mask.\n  Remove one of them.",
    ),
    "excludes, itself": (
        lambda: compose(excluding(excludes={"mine": "one is enough."}), a_class()()),
        Conflict,
        "'mine' and 'mine' exclude each other: one is enough.\n  Remove one of them.",
    ),
    "excludes, a preset": (
        lambda: compose(excluding(excludes={"s2t": "both mask."}), preset("stapo").objective),
        Conflict,
        "'mine' and 's2t' exclude each other: both mask.\n  Remove one of them.",
    ),
    "requires a method": (
        lambda: make_plan(compose(excluding(requires={"s2t": "it counts what is left."})), []),
        Conflict,
        "'mine' needs 's2t' beside it: it counts what is left.\n  Add it, or remove 'mine'.",
    ),
    "requires a field": (
        lambda: make_plan(compose(excluding(requires={"bounds": "it scales them."})), []),
        Conflict,
        "'mine' needs a method that writes 'bounds' beside it: it scales them.\n  Add it, or remove 'mine'.",
    ),
    "requires, observed only": (
        lambda: make_plan(compose(excluding(requires={"s2t": "it counts what is left."}), observe(S2TMask())), []),
        Conflict,
        "'mine' needs 's2t' beside it: it counts what is left.\n  Add it, or remove 'mine'.",
    ),
    "requires a field, observed only": (
        lambda: make_plan(compose(excluding(requires={"gates": "it scales them."}), observe(ClipHigher())), []),
        Conflict,
        "'mine' needs a method that writes 'gates' beside it: it scales them.\n  Add it, or remove 'mine'.",
    ),
}
STEPS = {
    "scope misspelt": (
        lambda: make_plan(compose(), [], scope="micro"),
        OutOfRange,
        "make_plan: scope = 'micro', expected 'step' (the optimizer step) or 'microbatch'.",
    ),
    "one batch for the parts": (
        lambda: make_plan(compose(), batch_of(ROWS)),
        OutOfRange,
        "make_plan: the parts are one TokenBatch, expected a list of them. Write [batch].",
    ),
    "a part that is no batch": (
        lambda: make_plan(compose(), [{"advantages": 1}]),
        OutOfRange,
        "make_plan: a part is a dict, expected a TokenBatch. Build it by from_padded.",
    ),
    "a batch of another plan": (
        lambda: make_plan(compose(), [batch_of(ROWS)]).part(batch_of(ROWS)),
        OutOfRange,
        "this batch is not one of the parts that the plan was made from: statistics and denominators are theirs. "
        "Pass the same TokenBatch object, or the number of the part.",
    ),
    "a part beyond the last": (
        lambda: make_plan(compose(), [batch_of(ROWS)]).part(1),
        OutOfRange,
        "part 1: the plan was made from 1 parts, numbered from 0.",
    ),
    "a part that is a policy": (
        lambda: make_plan(compose(), [batch_of(ROWS)]).part(PolicyOutputs(torch.ones(2))),
        OutOfRange,
        "a PolicyOutputs names no part of a plan. Give its TokenBatch, or its number in the list.",
    ),
    "a tensor for the policy": (
        whole(policy=lambda live: live.logprobs),
        OutOfRange,
        "the policy is a Tensor, expected PolicyOutputs. Write PolicyOutputs.from_padded(batch, logprobs=...).",
    ),
    "a policy of other tokens": (
        whole(policy=lambda live: live.select(torch.tensor([0]))),
        ShapeError,
        "the policy has 1 log-probs for a batch of 5 tokens. Build it with PolicyOutputs.from_padded(batch, ...) "
        "from the same rows.",
    ),
    "a policy as padded": (
        whole(policy=lambda live: PolicyOutputs(torch.zeros(2, 3))),
        ShapeError,
        "PolicyOutputs: 'logprobs' has shape (2, 3), expected (n,), the same for all. Build it with "
        "PolicyOutputs.from_padded(batch, ...).",
    ),
    "a policy that was detached": (
        whole(policy=lambda live: live.constant()),
        MissingSignal,
        "the log-probs of the policy do not require grad, so the loss would train nothing. Pass live outputs that"
        " were not detached, or compute the loss under torch.no_grad().",
    ),
    "a policy on another device": (
        whole(policy=lambda live: PolicyOutputs(live.logprobs.to("meta"))),
        ShapeError,
        "the policy is on meta, and the batch on cpu. Move the batch: batch.to(device).",
    ),
    "entropies of other tokens": (
        whole(policy=lambda live: replace(live, entropies=live.entropies[:1])),
        ShapeError,
        "PolicyOutputs: 'entropies' has shape (1,), expected (n,), the same for all. Build it with "
        "PolicyOutputs.from_padded(batch, ...).",
    ),
    "log-probs that were detached": (
        whole(policy=lambda live: replace(live, logprobs=live.logprobs.detach())),
        MissingSignal,
        "the log-probs of the policy do not require grad, so the loss would train nothing. Pass live outputs that"
        " were not detached, or compute the loss under torch.no_grad().",
    ),
    "entropies that were detached": (
        whole(compose(EntropyBonus()), lambda live: replace(live, entropies=live.entropies.detach())),
        MissingSignal,
        "the penalty 'entropy_bonus' has no gradient: it reads nothing of the live policy that requires grad. "
        "Pass live entropies that were not detached, and let it read `policy`, not `anchor`.",
    ),
    "advantages of shape (B, 1)": (
        padded(advantages=torch.ones(2, 1)),
        ShapeError,
        "TokenBatch.from_padded: 'advantages' has shape (2, 1), expected (2,) or (2, 3). Give one per response, "
        "or one per token.",
    ),
    "advantages of a list": (
        padded(advantages=[1.0, 1.0]),
        OutOfRange,
        "TokenBatch.from_padded: 'advantages' is a list, expected a tensor. Write torch.tensor(advantages).",
    ),
    "a float mask with NaN": (
        padded(response_mask=torch.tensor([[1.0, NAN, 0.0], [1.0, 1.0, 1.0]])),
        OutOfRange,
        "TokenBatch.from_padded: 'response_mask' holds nan, expected 1 on tokens that count and 0 elsewhere. "
        "Compare first, for example labels != -100.",
    ),
    "labels for a mask": (
        padded(response_mask=torch.tensor([[1, 5, -100], [1, 1, 1]])),
        OutOfRange,
        "TokenBatch.from_padded: 'response_mask' holds 5, expected 1 on tokens that count and 0 elsewhere. "
        "Compare first, for example labels != -100.",
    ),
    "prompts included": (
        padded(old_logprobs=torch.zeros(2, 8)),
        ShapeError,
        "TokenBatch.from_padded: 'old_logprobs' has shape (2, 8), 'response_mask' has (2, 3). Both are (B, T) "
        "over response tokens only: cut the prompt off first.",
    ),
    "token ids for log-probs": (
        padded(old_logprobs=torch.ones(2, 3, dtype=torch.int64)),
        ShapeError,
        "TokenBatch.from_padded: 'old_logprobs' is torch.int64, expected floats. Pass log-probs or entropies, not"
        " token ids or ranks.",
    ),
    "group_ids as a list": (
        padded(group_ids=["a", "b"]),
        OutOfRange,
        "TokenBatch.from_padded: 'group_ids' is a list, expected a tensor. Number the prompts, for example "
        "torch.tensor([0, 0, 1, 1]).",
    ),
    "group_ids of floats": (
        padded(group_ids=torch.tensor([0.0, 0.5])),
        ShapeError,
        "TokenBatch.from_padded: 'group_ids' is torch.float32, expected integers. Number the prompts, for example"
        " torch.tensor([0, 0, 1, 1]).",
    ),
    "group_ids of tokens": (
        padded(group_ids=torch.ones(2, 3, dtype=torch.int64)),
        ShapeError,
        "TokenBatch.from_padded: 'group_ids' has shape (2, 3), expected (2,). Give one per response.",
    ),
    "another device": (
        padded(old_logprobs=torch.ones(2, 3, device="meta")),
        ShapeError,
        "TokenBatch: 'advantages' is on cpu, 'old_logprobs' is on meta. Move them to one device.",
    ),
    "a signal that is not there": (
        lambda: batch_of(ROWS).signal("mine"),
        MissingSignal,
        "signal 'mine' was read, but the batch was built without it; it has: entropies, ref_logprobs, "
        "rollout_logprobs, max_logprobs, log_kept_mass, truncated, branch, block_ids. Pass extra={'mine': values} to "
        "TokenBatch.from_padded, or name it in the method's `needs` so that a trainer provides it.",
    ),
    "old_logprobs with a gradient": (
        lambda: replace(batch_of(ROWS), old_logprobs=torch.ones(5, requires_grad=True)),
        ShapeError,
        "TokenBatch: 'old_logprobs' requires grad. A batch holds evidence; what is differentiated goes into "
        "PolicyOutputs.",
    ),
}

CURES = {
    "a class": "was given the class ClipHigher. Make a method of it: ClipHigher().",
    "a list": "was given a list. Compose it first: compose(*methods).",
    "a preset": "was given a Preset. Pass its objective: preset('...').objective.",
    "a name": "was given the name 's2t'. Write load_objective([{'name': 's2t'}]), or make the method.",
    "None": "was given None, which is no TokenObjective. Derive its class from it.",
}
GIVEN = {"a class": ClipHigher, "a list": [ClipHigher()], "a preset": preset("dapo"), "a name": "s2t", "None": None}
CALLS = {
    "compose": compose,
    "within": lambda given: within(given, S2TMask()),
    "observe": observe,
    "make_plan": lambda given: make_plan(given, []),
}
TABLE = {**CLASSES, **MEASURES, **STATES, **TERMS, **FUNCTIONS, **FITS, **STEPS}


def test_each_mistake_has_a_name_of_its_own():
    assert len(TABLE) == sum(map(len, (CLASSES, MEASURES, STATES, TERMS, FUNCTIONS, FITS, STEPS)))


@pytest.mark.parametrize(("act", "error", "text"), TABLE.values(), ids=TABLE)
def test_a_mistake_is_told(act, error, text):
    with pytest.raises(error) as caught:
        act()
    assert type(caught.value) is error
    assert str(caught.value) == text


@pytest.mark.parametrize("what", CURES)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_method_is_told_with_what_to_write(call, what):
    spread = call == "compose" and what == "a list"
    with says(MethodError, f"{call} {'was given a list. Spread it: compose(*methods).' if spread else CURES[what]}"):
        CALLS[call](GIVEN[what])


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
    meeting, told = _Meeting(3), {}

    def work(rank):
        parts = [batch_of([ROWS[rank]], [rank])] if rank < 2 else []
        try:
            make_plan(objective, parts, comm=_ThreadComm(meeting, rank))
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


def test_what_is_only_observed_may_weigh_anything():
    make_plan(compose(observe(Scale(weight=-1.0))), [batch_of(ROWS)])


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


def test_a_gradient_at_the_door_is_dropped():
    ones = torch.ones(2, 3)
    batch = TokenBatch.from_padded(
        response_mask=ones.bool(), advantages=torch.ones(2), old_logprobs=(-ones).requires_grad_()
    )
    assert not batch.old_logprobs.requires_grad


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


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("at: 1", "objective.0.at: expected a list, not 1."),
        ("at: [0, -1]", "objective.0.at.1: expected a number of at least 0, not -1."),
        ("at: [0.5]", "objective.0.at.0: expected a whole number, not 0.5."),
        ("at: ['3']", "objective.0.at.0: expected a whole number, not '3'."),
        ("at: ~", "objective.0.at: expected a list, not null."),
        ("shares: [a]", "objective.0.shares.0: expected a number, not 'a'."),
    ],
)
def test_a_wrong_item_of_a_tuple_is_named_with_its_line(yaml, settings, text):
    register(Places)
    with says(ConfigError, f"run.yaml:3: {text}"):
        yaml(f"objective:\n  - name: places\n    {settings}\n")


def test_excludes_and_requires_are_told_with_file_and_line(yaml):
    register(a_class(name="loner", excludes={"s2t": "both mask."}))
    register(a_class(name="needy", requires={"bounds": "it scales them."}))
    excluded = "'loner' and 's2t' exclude each other: both mask.\n  Remove one of them."
    with says(Conflict, f"run.yaml:2: objective: {excluded}"):
        yaml("seed: 1\nobjective:\n  - loner\n  - s2t\n")
    with says(Conflict, f"run.yaml:1: objective: {excluded}"):
        yaml("objective:\n  - preset: stapo\n  - loner\n")
    with says(Conflict, f"run.yaml:2: objective.0: {excluded}"):
        yaml("objective:\n  - {name: within, outer: s2t, inner: loner}\n")
    lacking = "'needy' needs a method that writes 'bounds' beside it: it scales them.\n  Add it, or remove 'needy'."
    with says(Conflict, f"run.yaml:2: objective: {lacking}"):
        yaml("seed: 1\nobjective: [needy, s2t]\n")
    assert yaml("objective: [needy, clip_higher]\n")
    assert yaml("objective: [s2t, {name: observe, method: loner}]\n")


def test_a_class_made_inside_a_function_obeys_every_law():
    class Inside(TokenObjective):
        name = "inside"
        writes = {"keep"}
        at: tuple[int, ...] = (0, 2)

        def init_state(self):
            return {"steps": 0}

        def advance(self, state, stat):
            return {"steps": state["steps"] + 1}

        def terms(self, batch, stat, state):
            return Terms(keep=~torch.isin(batch.position, torch.tensor(self.at)))

    report = check_objective(Inside(), examples=2)
    assert report.ok, str(report)


def test_public_names_are_listed_in_order_and_documented():
    assert rlstab.__all__ == sorted(rlstab.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert len(set(rlstab.__all__)) == len(rlstab.__all__)
    data = {
        name
        for name in rlstab.__all__
        if not (callable(getattr(rlstab, name)) or inspect.ismodule(getattr(rlstab, name)))
    }
    for name in set(rlstab.__all__) - data - {"Stat", "State"}:
        assert inspect.getdoc(getattr(rlstab, name)), name
    sources = "".join(inspect.getsource(module) for module in (stats, objective))
    for name in data:
        assert re.search(rf"^#: .*\n{name}: ", sources, re.MULTILINE), name


def test_every_error_is_of_the_tree_and_says_in_one_line_what_it_means():
    found = [one for one in vars(rlstab.errors).values() if isinstance(one, type) and issubclass(one, Exception)]
    tree = [one for one in found if not issubclass(one, Warning)]
    assert len(tree) > 10
    for one in tree:
        assert issubclass(one, rlstab.errors.RlstabError)
        assert one is rlstab.errors.RlstabError or len(one.__bases__) == 2, one
        assert re.fullmatch(r"[^\n]+\.", one.__doc__), one
