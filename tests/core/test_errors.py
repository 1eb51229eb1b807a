"""A user's mistake is reported when it happens: who, what, and the cure. Each case is one mistake.

The texts are in tests/errors.txt, to be read as a whole; ``python -m tests.core.test_errors`` rewrites it.

Deliberately not checked, because a check would wait for the device, or the mistake looks like correct use:

- a gate that is NaN or negative on some tokens: `plan.loss` counts NaN in `nonfinite`, and a whole call raises;
- weights of what is only observed, and weights whose product alone overflows;
- prompts that the response mask counts;
- a part of which the loss is never taken, and a `plan.state` that is not passed on.
"""

import functools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch

import rlstab
from rlstab import (
    STARE,
    Bounds,
    ClipHigher,
    EntropyBonus,
    Gate,
    KLPenalty,
    LpReg,
    Mean,
    Penalty,
    PolicyOutputs,
    Pool,
    Range,
    S2TMask,
    SequenceMean,
    Surrogate,
    Terms,
    TokenBatch,
    TokenMean,
    TokenObjective,
    compose,
    make_plan,
    observe,
    preset,
    register,
    within,
)
from rlstab.core.batch import layout_of
from rlstab.core.metadata import About
from rlstab.core.method import measure_all
from rlstab.core.objective import require_signals
from rlstab.core.terms import WRITABLE
from rlstab.errors import (
    Conflict,
    MethodError,
    MissingSignal,
    NonFinite,
    OutOfRange,
    RlstabError,
    ShapeError,
    UnknownName,
)
from rlstab.testing.run import in_threads
from rlstab.zoo import METHODS
from tests.core.methods import Chooser, DropPunished, PassRate, Scale
from tests.core.steps import batch_of, live_of, random_rows

ROWS = random_rows(11, [3, 2])
NAN, INF = math.nan, math.inf
ONE = Mean.scalar(1.0)


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


def padded(**changes):
    """Build a batch of 2 rows and 3 columns."""
    ones = torch.ones(2, 3)
    given = {"response_mask": ones, "advantages": torch.ones(2), "old_logprobs": -ones}
    return lambda: TokenBatch.from_padded(**(given | changes))


def whole(objective=None, policy=lambda live: live, rows=ROWS, dtype=torch.float64):
    """Call an objective on a batch and live outputs, perhaps changed."""

    def act():
        batch = batch_of(rows, dtype=dtype)
        return (objective or compose())(batch, policy(live_of(batch, rows, dtype=dtype)[0]))

    return act


def changed(**fields):
    """The rows with other values at their first token."""
    return [[{**ROWS[0][0], **fields}, *ROWS[0][1:]], ROWS[1]]


#: Advantages that float32 holds, and whose product with a ratio it does not.
LOUD = [[{**own, "A": 3e38, "logp": own["old"] / 2} for own in row] for row in ROWS]


def taken_twice():
    batch = batch_of(ROWS)
    plan = make_plan(compose(), [batch])
    with torch.no_grad():
        plan.loss(0, live_of(batch, ROWS)[0])  # one that is only looked at is none
    plan.loss(0, live_of(batch, ROWS)[0])
    plan.loss(batch, live_of(batch, ROWS)[0])


def hosted(objective, provides, live):
    """Run an objective in a host that provides so much."""
    return lambda: require_signals(objective, provides=provides, live=live, host="this host")


def with_setting(hint, default):
    """Make a method that has a setting of this type."""
    return lambda: a_class(__annotations__={"chosen": hint}, chosen=default)()


def by_tokens(some, other):
    return lambda self, batch, *stat: some(batch) if len(batch) else other(batch)


def mean(batch):
    return Mean.of(batch.advantages)


def same(ratio, constants):
    return ratio


def column(ratio, constants):
    return ratio[:, None]


def half(*given):
    return 0.5


def live_logprobs(policy, anchor):
    return policy.logprobs


def plan(*methods, state=None, batch=None):
    return lambda: make_plan(compose(*methods), [batch_of(ROWS) if batch is None else batch], state)


def method(**attributes):
    return a_class(**attributes)()


MISTAKES: dict[type, dict] = {
    MethodError: {
        "NaN weights": planned(lambda b: Terms(weight=like(b, NAN))),
        "weight of ints": planned(lambda b: Terms(weight=like(b, 1).long())),
        "a pool read as a mean": measured(
            measure=lambda self, b: {"a": Pool.top(b.advantages, 0.5)}, advance=lambda self, state, stat: stat.mean("a")
        ),
        "measure returns a key that is not text": measured(measure=lambda self, b: {0: mean(b)}),
        "a name with a slash": lambda: a_class(name="a/b"),
        "a name that metrics have": lambda: a_class(name="tokens"),
        "no name": lambda: a_class(name=None),
        "name of a combinator": lambda: a_class(name="within"),
        "needs as a list": lambda: a_class(needs=["entropies", "ref_logprobs"]),
        "writes misspelt": lambda: a_class(writes=frozenset({"wieght"})),
        "drift misspelt": lambda: a_class(reads_drift=frozenset({"samplr"})),
        "a property that returns text": lambda: compose(a_class(needs=property(lambda self: "entropies"))()),
        "excludes as a set": lambda: a_class(excludes={"kl"}),
        "needs what every batch has": lambda: a_class(needs={"advantages"}),
        "setting of type dict": with_setting(dict, None),
        "annotation that cannot be resolved": with_setting("Unheard", None),
        "register an object": lambda: register(ClipHigher()),
        "register something that is not a method": lambda: register(int),
        "measure returns a tensor": measured(measure=lambda self, b: b.advantages),
        "measure returns a dict with a tensor": measured(measure=lambda self, b: {"a": b.advantages.sum()}),
        "kinds differ without tokens": measured(
            measure=by_tokens(lambda b: {"a": mean(b)}, lambda b: {"a": Pool.top(b.advantages, 0.5)})
        ),
        "levels differ between parts": measured(
            measure=lambda self, b: {"a": Pool.top(b.advantages, 1 / (1 + len(b)))}
        ),
        "measure fails without tokens": measured(measure=lambda self, b: {"a": Mean.scalar(float(b.advantages.max()))}),
        "a name in both rounds": measured(
            measure=lambda self, b: {"a": mean(b)}, measure_again=lambda self, b, stat: {"a": mean(b)}
        ),
        "init_state returns None": measured(init_state=lambda self: None),
        "advance returns None": measured(init_state=lambda self: {"k": 0}, advance=lambda self, state, stat: None),
        "advance drops a key": measured(
            init_state=lambda self: {"k": 0, "l": 0}, advance=lambda self, state, stat: {"l": 1}
        ),
        "advance adds a key": measured(advance=lambda self, state, stat: {"k": 1}),
        "terms returns None": planned(lambda b: None),
        "fields that were not declared": planned(lambda b: Terms(weight=like(b, 1), bonus=like(b, 1)), writes={"keep"}),
        "keep of ints": planned(lambda b: Terms(keep=like(b, 1).long())),
        "keep of sequences": planned(lambda b: Terms(keep=b.sequence_ids >= 0)),
        "keep as a list": planned(lambda b: Terms(keep=[True] * len(b))),
        "keep on another device": planned(lambda b: Terms(keep=torch.ones(len(b), dtype=torch.bool, device="meta"))),
        "weight with a gradient": planned(lambda b: Terms(weight=like(b, 1).requires_grad_())),
        "infinite weights": planned(lambda b: Terms(weight=like(b, INF))),
        "a NaN bonus": planned(lambda b: Terms(bonus=torch.where(b.position == 0, NAN, like(b, 1)))),
        "negative bounds of tokens": planned(lambda b: Terms(bounds=Bounds(like(b, -0.1), like(b, 0.2)))),
        "NaN bounds of tokens": planned(lambda b: Terms(bounds=Bounds(0.2, like(b, NAN)))),
        "a tensor in report": planned(lambda b: Terms(report={"share": b.advantages})),
        "a gate without a name": planned(lambda b: Terms(gates=Gate(same))),
        "a gate, where of floats": planned(lambda b: Terms(gates={"": Gate(abs, where=b.advantages)})),
        "a penalty that is a pair": planned(lambda b: Terms(penalties={"": (0.1, abs)})),
        "a penalty with a NaN coefficient": planned(lambda b: Terms(penalties={"": Penalty(NAN, abs)})),
        "a penalty, reads as text": planned(lambda b: Terms(penalties={"": Penalty(0.1, abs, reads="entropies")})),
        "a penalty, reads misspelt": planned(lambda b: Terms(penalties={"": Penalty(0.1, abs, reads={"entropy"})})),
        "bounds as a pair": planned(lambda b: Terms(bounds=(0.2, 0.28))),
        "bounds negative": planned(lambda b: Terms(bounds=Bounds(-0.2, 0.28))),
        "bounds, dual below 1": planned(lambda b: Terms(bounds=Bounds(0.2, 0.28, 0.5))),
        "lr_scale negative": planned(lambda b: Terms(lr_scale=-0.5)),
        "lr_scale a tensor": planned(lambda b: Terms(lr_scale=torch.ones(()))),
        "lr_scale of the batch": planned(lambda b: Terms(lr_scale=1 / (1 + len(b)))),
        "a gate that returns a column": lost(lambda b: Terms(gates={"soft": Gate(column)})),
        "a gate that returns a number": lost(lambda b: Terms(gates={"": Gate(half)})),
        "a penalty whose name has a slash": planned(lambda b: Terms(penalties={"b/c": Penalty(0.1, live_logprobs)})),
        "a metric without a name": planned(lambda b: Terms(report={"": ONE})),
        "a metric named as the one of its gate": planned(
            lambda b: Terms(gates={"": Gate(same)}, report={"stopped": ONE})
        ),
        "a metric named as the one of its penalty": planned(
            lambda b: Terms(penalties={"": Penalty(0.1, live_logprobs)}, report={"value": ONE})
        ),
        "a metric named as one of what is observed": planned(lambda b: Terms(report={"would_drop": ONE})),
        "a gate named as an observed clip": planned(lambda b: Terms(gates={"clip": Gate(same)})),
        "a pull that returns a number": lost(lambda b: Terms(surrogate=Surrogate(half))),
        "a penalty that returns a mean": lost(
            lambda b: Terms(penalties={"kl": Penalty(0.1, lambda live, anchor: live.logprobs[0])})
        ),
        "a ratio that returns sequences": lost(
            lambda b: Terms(ratio=lambda live, held: b.sequence_mean(live.logprobs))
        ),
        "an aggregate that returns a number": lost(lambda b: Terms(aggregate=half)),
        "a penalty whose aggregate returns a number": lost(
            lambda b: Terms(penalties={"kl": Penalty(0.1, live_logprobs, aggregate=half)})
        ),
    },
    OutOfRange: {
        "an infinite cap": lambda: Chooser(1, cap=INF),
        "a share of None": lambda: Chooser(1, share=None),
        "a piece of part of a sequence": lambda: make_plan(compose(), [batch_of(ROWS)]).piece(batch_of([ROWS[0][:2]])),
        "a state that is none": plan(STARE(), state=5),
        "a share of nothing": measured(measure=lambda self, b: {"a": Pool.top(b.advantages, 0.0)}),
        "post init without super": lambda: a_class(
            __annotations__={"share": Annotated[float, Range(le=1)]}, share=0.5, __post_init__=lambda self: None
        )(share=2.0),
        "a quantile in percent": measured(measure=lambda self, b: {"a": Pool.quantile(b.advantages, 75)}),
        "a state of a smaller composition": plan(STARE(), S2TMask(), state=compose(S2TMask()).init_state()),
        "a state of a larger composition": plan(S2TMask(), state=compose(STARE(), S2TMask()).init_state()),
        "a state of another method of that key": plan(STARE(), state={"stare": {"gate": True}}),
        "no state where one is needed": whole(compose(STARE())),
        "no state where the learning rate is scaled": whole(compose(ClipHigher(), Scale(lr=0.5))),
        "scope misspelt": lambda: make_plan(compose(), [], scope="micro"),
        "a batch of another plan": lambda: make_plan(compose(), [batch_of(ROWS)]).part(batch_of(ROWS)),
        "a part beyond the last": lambda: make_plan(compose(), [batch_of(ROWS)]).part(1),
        "advantages of a list": padded(advantages=[1.0, 1.0]),
        "a float mask with NaN": padded(response_mask=torch.tensor([[1.0, NAN, 0.0], [1.0, 1.0, 1.0]])),
        "labels for a mask": padded(response_mask=torch.tensor([[1, 5, -100], [1, 1, 1]])),
        "probabilities for log-probs": plan(batch=batch_of(changed(old=0.5))),
        "negative entropies": plan(S2TMask(), batch=batch_of(changed(H=-1.5))),
        "sequence ids twice over parts": lambda: make_plan(compose(), [batch_of(ROWS[:1]), batch_of(ROWS[1:])]),
        "a loss taken twice": taken_twice,
        "a share of 0": lambda: Chooser(1, share=0.0),
        "a share of True": lambda: Chooser(1, share=True),
        "a number beyond floats": lambda: Chooser(1, free=10**400),
        "a choice that is none": lambda: Chooser(1, mode="some"),
        "a float for an int": lambda: Chooser(2.0),
        "an int for a bool": lambda: Chooser(1, flag=1),
    },
    MissingSignal: {
        "group_ids that were not given, within": lambda: make_plan(within(DropPunished(), PassRate()), [padded()()]),
        "log-probs that were detached": whole(policy=lambda live: replace(live, logprobs=live.logprobs.detach())),
        "a penalty of constants": lost(
            lambda b: Terms(penalties={"": Penalty(0.1, lambda live, anchor: anchor.logprobs)})
        ),
        "entropies that were detached": whole(
            compose(EntropyBonus()), lambda live: replace(live, entropies=live.entropies.detach())
        ),
        "a signal that is missing": lambda: batch_of(ROWS).signal("mine"),
        "a signal that a method needs": lambda: make_plan(compose(S2TMask()), [batch_of(ROWS, without=["entropies"])]),
        "a host without a signal": hosted(within(rlstab.TopEntropyMask(), LpReg()), {"entropies"}, {"log_kept_mass"}),
        "a host without a live output": hosted(compose(EntropyBonus()), {"entropies"}, set()),
    },
    Conflict: {
        "excludes": lambda: compose(method(excludes={"s2t": "both mask."}), S2TMask()),
        "excludes, inside within": lambda: compose(
            method(excludes={"kl": "one is enough."}), within(S2TMask(), KLPenalty())
        ),
        "excludes, the two parts of within": lambda: within(S2TMask(), method(excludes={"s2t": "both mask."})),
        "a slot with two owners": lambda: compose(TokenMean(), S2TMask(), SequenceMean()),
        "a surrogate beside bounds": lambda: compose(ClipHigher(), rlstab.CISPO()),
        "one signal defined twice": lambda: compose(LpReg(min_p=0.1), LpReg()),
        "within, inner bounds": lambda: within(S2TMask(), ClipHigher()),
        "within, inner learning rate": lambda: within(S2TMask(), Scale(lr=0.5)),
        "within, outer without a mask": lambda: within(STARE(), S2TMask()),
        "observe, an aggregation": lambda: observe(SequenceMean()),
        "a name of another class": lambda: register(a_class(name="s2t")),
    },
    ShapeError: {
        "group_ids of another number": lambda: replace(batch_of(ROWS), group_ids=torch.arange(3)),
        "positions of another number": lambda: replace(batch_of(ROWS), position=torch.arange(2)),
        "token ids for log-probs": padded(old_logprobs=torch.ones(2, 3, dtype=torch.int64)),
        "a policy of other tokens": whole(policy=lambda live: live.select(torch.tensor([0]))),
        "a policy as padded": whole(policy=lambda live: PolicyOutputs(torch.zeros(2, 3))),
        "a policy on another device": whole(policy=lambda live: PolicyOutputs(live.logprobs.to("meta"))),
        "entropies of other tokens": whole(policy=lambda live: replace(live, entropies=live.entropies[:1])),
        "prompts included": padded(old_logprobs=torch.zeros(2, 8)),
        "group_ids of floats": padded(group_ids=torch.tensor([0.0, 0.5])),
        "group_ids of tokens": padded(group_ids=torch.ones(2, 3, dtype=torch.int64)),
        "another device": padded(old_logprobs=torch.ones(2, 3, device="meta")),
        "old_logprobs with a gradient": lambda: replace(batch_of(ROWS), old_logprobs=torch.ones(5, requires_grad=True)),
        "a token of no sequence": lambda: replace(batch_of(ROWS), sequence=torch.tensor([0, 0, 0, 1, 2])),
        "a token of a sequence below 0": lambda: replace(batch_of(ROWS), sequence=torch.tensor([0, 0, -3, 9, 1])),
        "sequence ids of int32": lambda: replace(batch_of(ROWS), sequence_ids=torch.arange(2).int()),
        "a mask of one dimension": padded(response_mask=torch.ones(6)),
        "live outputs of other tokens": lambda: PolicyOutputs.from_padded(
            padded()(), logprobs=torch.zeros(2, 3), entropies=torch.zeros(2, 2)
        ),
        "a padded layout of a batch that has none": lambda: layout_of(TokenBatch.empty()),
    },
    UnknownName: {
        "a signal misspelt": padded(entropy=torch.ones(2, 3)),
        "a setting misspelt": lambda: S2TMask(max_probs=0.1),
        "a field of Terms misspelt": planned(lambda b: Terms(weights=like(b, 1))),
        "a field of Bounds misspelt": planned(lambda b: Terms(bounds=Bounds(0.2, hgih=0.28))),
        "a field of Penalty misspelt": planned(lambda b: Terms(penalties={"": Penalty(coefficent=0.1, fn=same)})),
        "a field of Gate misspelt": planned(lambda b: Terms(gates={"": Gate(same, were=b.rewarded)})),
        "a field of PolicyOutputs misspelt": lambda: PolicyOutputs(logprob=torch.zeros(5)),
        "a field of About misspelt": lambda: a_class(about=About(address={"token"})),
        "a bound of Range misspelt": lambda: Range(ge=0, let=1),
        "a method misspelt": lambda: METHODS.get("s2tt"),
    },
    NonFinite: {
        "NaN and Inf in the evidence": plan(S2TMask(), batch=batch_of(changed(old=-INF, H=NAN))),
        "a live log-prob above 0": whole(policy=lambda live: replace(live, logprobs=live.logprobs.exp())),
        "a live entropy below 0": whole(
            compose(EntropyBonus()), lambda live: replace(live, entropies=-2 - live.entropies)
        ),
        "advantages at the edge of float32": whole(policy=lambda live: live, rows=LOUD, dtype=torch.float32),
    },
}
GIVEN = {"a class": ClipHigher, "a list": [ClipHigher()], "a preset": preset("dapo"), "a name": "s2t", "None": None}
CALLS = {
    "compose": compose,
    "within": lambda given: within(given, S2TMask()),
    "observe": observe,
    "make_plan": lambda given: make_plan(given, []),
}
MISTAKES[MethodError] |= {
    f"{call}: {what}": functools.partial(CALLS[call], GIVEN[what]) for call in CALLS for what in GIVEN
}
FILE = Path(__file__).parents[1] / "errors.txt"


def told() -> str:
    """Each mistake with its error, as the file has them."""
    lines = []
    for error, mistakes in MISTAKES.items():
        for name, act in mistakes.items():
            with pytest.raises(error) as caught:
                act()
            assert type(caught.value) is error, name
            lines.append(f"{name}\n    {error.__name__}: " + str(caught.value).replace("\n", "\n    "))
    return "\n".join(lines) + "\n"


def test_each_mistake_is_told_as_the_file_says():
    assert told().split("\n") == FILE.read_text(encoding="utf-8").split("\n")


def test_the_culprit_is_named_where_others_hide_it():
    """Two negative weights make a positive one; inside `within` a method saw the three tokens of the first row."""
    rows = [[{**own, "A": sign} for own in row] for row, sign in zip(ROWS, (1.0, -1.0), strict=True)]
    nested = within(DropPunished(), compose(Scale(weight=-1.0), S2TMask()))
    for methods, named in (
        ([Scale(weight=-1.0), Scale(weight=-2.0), S2TMask()], "'scale_1' gave 5 "),
        ([Scale(), nested], "'within/inner/scale' gave 3 "),
    ):
        with pytest.raises(MethodError, match=named):
            make_plan(compose(*methods), [batch_of(rows)])


@pytest.mark.parametrize(
    ("spoil", "own", "others"),
    [
        ({"H": 9.0}, "MethodError: 'mine' gave 1 weights", "MethodError: on another rank a method gave 1 weights"),
        ({"old": NAN}, *["NonFinite: .* 1 in 'old_logprobs'"] * 2),
        ({"old": 0.3}, *["OutOfRange: .* 1 in 'old_logprobs'"] * 2),
    ],
)
def test_every_rank_raises_and_the_one_with_the_culprit_names_it(spoil, own, others):
    def spoilt(b):
        return Terms(bonus=torch.where(b.entropies == 9.0, NAN, 0.0).double())

    objective = compose(asking(spoilt, writes={"bonus"}, needs={"entropies"}))
    rows = changed(**spoil)[::-1]  # the second rank has it, the third has no part

    def raised(rank, comm):
        with pytest.raises(RlstabError) as caught:
            make_plan(objective, [batch_of([row], [rank]) for row in rows[rank : rank + 1]], comm=comm)
        return f"{type(caught.value).__name__}: {caught.value}"

    for text, wanted in zip(in_threads(3, raised), (others, own, others), strict=True):
        assert re.match(wanted, text)


def test_names_that_a_rank_without_parts_lacks_are_told_before_ranks_wait_for_each_other():
    method = a_class(measure=by_tokens(lambda b: {"a": mean(b)}, lambda b: {}))()
    with pytest.raises(MethodError, match="returned a Mean for 'a' on a part"):
        measure_all(method, [batch_of(ROWS)], {}, comm=None)  # which nobody calls


def test_what_is_only_observed_excludes_nothing():
    rival = a_class(excludes={"s2t": "both mask."})()
    make_plan(compose(observe(rival), S2TMask()), [])
    make_plan(compose(a_class(excludes={"s2t": "both mask."})(), observe(S2TMask())), [])
    compose(a_class(excludes={"mine": "one is enough."})())
    compose(rlstab.CISPO(), observe(ClipHigher()))


def test_a_loss_that_is_only_looked_at_needs_no_gradient():
    batch = batch_of(ROWS)
    policy = live_of(batch, ROWS)[0].constant()
    with torch.no_grad():
        assert math.isfinite(compose(KLPenalty())(batch, policy).loss)
    silent = batch_of([[{**own, "A": 0.0} for own in row] for row in ROWS])
    assert make_plan(compose(), [silent]).loss(0, policy).loss == 0


def test_what_rounding_makes_is_no_mistake():
    """float32 makes at most 3e-4 of logits in the thousands; hosts make entropies in bfloat16 that are off by 0.5."""
    batch = batch_of(changed(old=5e-4, H=-0.4, ref=5e-4, now=5e-4, rollout=5e-4))
    objective = compose(S2TMask(), KLPenalty(), EntropyBonus())
    policy = live_of(batch, changed(logp=5e-4, live_H=-0.4))[0]
    assert objective(batch, policy).nonfinite == 0


def test_what_nothing_reads_may_be_impossible():
    """Off the rows that a plan names live outputs may hold anything finite, and signals that no method needs too."""
    rows = changed(A=0.0, H=-2.0, logp=0.7, live_H=-2.0)
    batch = batch_of(rows)
    assert compose(ClipHigher())(batch, live_of(batch, rows)[0]).nonfinite == 0
    assert compose(EntropyBonus(coefficient=0.0))(batch_of(changed(H=0.1)), live_of(batch, ROWS)[0]).nonfinite == 0


def test_every_error_is_of_the_tree():
    errors = [value for value in vars(rlstab.errors).values() if isinstance(value, type)]
    tree = [error for error in errors if issubclass(error, Exception) and not issubclass(error, Warning)]
    assert len(tree) > 10
    assert [error for error in tree if not issubclass(error, RlstabError)] == []


if __name__ == "__main__":
    FILE.write_text(told(), encoding="utf-8")
