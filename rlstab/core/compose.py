"""Composition is closed: methods merge into one objective, whatever the order in which they are listed."""

import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Rounds, side_by_side
from rlstab.core.objective import Leaf, Member, State, TokenObjective, check_fit, check_methods, terms_of
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean, Settled
from rlstab.core.terms import SLOTS, Constants, Gate, Terms, merge_terms
from rlstab.errors import Conflict, OutOfRange

Item = TypeVar("Item")


def _union_inside(declared: str) -> Any:
    """The property that joins what the combined methods declare."""
    return property(lambda self: frozenset().union(*(getattr(method, declared) for method in self.inside)))


class Combinator(TokenObjective, combinator=True):
    """Methods as one, which needs, writes and compares what they do."""

    @property
    @abstractmethod
    def inside(self) -> tuple[TokenObjective, ...]:
        """What it combines."""

    needs, live_needs, writes, reads_drift = map(_union_inside, ("needs", "live_needs", "writes", "reads_drift"))

    @property
    def signal_options(self) -> Mapping[str, float]:
        return {name: value for method in self.inside for name, value in method.signal_options.items()}


@final
class Composition(Combinator, combinator=True):
    """Several methods as one. Make it with :func:`compose`; ``str`` shows who contributes to which field."""

    members: tuple[TokenObjective, ...]
    name = "composition"

    def __post_init__(self) -> None:
        check_methods("compose", self.members)
        nested = [member.members if isinstance(member, Composition) else (member,) for member in self.members]
        members = sorted(itertools.chain(*nested), key=lambda method: (method._label, repr(method)))
        object.__setattr__(self, "members", tuple(members))
        check_fit(self.keyed)

    @property
    def inside(self) -> tuple[TokenObjective, ...]:
        return self.members

    @cached_property
    def keyed(self) -> Mapping[str, TokenObjective]:
        """Members by key: their label, with a number if several have the same."""
        return numbered([(method._label, method) for method in self.members])

    def init_state(self) -> State:
        return {key: method.init_state() for key, method in self.keyed.items()}

    def _settling(self, parts: Sequence[TokenBatch], state: State, local: bool) -> Rounds[tuple[Settled, State]]:
        members = {key: method._settling(parts, state[key], local) for key, method in self.keyed.items()}
        settled = yield from side_by_side(members, local)
        stats = Settled({key: stat for key, (stat, _) in settled.items()})
        return stats, {key: new for key, (_, new) in settled.items()}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return merge_terms(
            {key: terms_of(method, batch, stat.member(key), state[key]) for key, method in self.keyed.items()}
        )

    def _member_terms(self, batch: TokenBatch, stat: Settled, state: State, key: str = "") -> dict[str, Member]:
        members: dict[str, Member] = {}
        for label, method in self.keyed.items():
            members |= method._member_terms(batch, stat.member(label), state[label], _under(key, label))
        return members

    def _leaves(self, around: tuple[Leaf, ...], observed: bool) -> Iterator[Leaf]:
        for method in self.members:
            yield from method._leaves(around, observed)

    def require_no_state(self) -> None:
        """Refuse members that need a state: without one, every step would silently use the first."""
        for key, method in self.keyed.items():
            stateful = _has_leaf(method.init_state())
            if stateful or "lr_scale" in method.writes:
                reason = "has state" if stateful else "scales the learning rate"
                raise OutOfRange(
                    f"'{key}' {reason}, and the objective was called without state=. Give objective.init_state() at "
                    f"first, then out.state of the last output, and multiply the learning rate by out.lr_scale."
                )

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.members))})"

    def __str__(self) -> str:
        width = max((len(key) for key in self.keyed), default=0)
        return "\n".join(
            f"{key:<{width}}  {', '.join(sorted(method.writes)):<24}  {method!r}" for key, method in self.keyed.items()
        )


@final
class Within(Combinator, combinator=True):
    """``inner`` sees only the tokens that ``outer`` keeps. Make it with :func:`within`."""

    outer: TokenObjective
    inner: TokenObjective
    name = "within"

    def __post_init__(self) -> None:
        check_methods("within", (self.outer, self.inner))
        slots = sorted(self.inner.writes & {*SLOTS, "lr_scale"})
        if slots:
            raise Conflict(
                f"within('{self.outer.name}', '{self.inner.name}'): the inner defines the {slots[0]}.\n  Use compose."
            )
        if "keep" not in self.outer.writes:
            raise Conflict(
                f"within('{self.outer.name}', '{self.inner.name}'): the outer method keeps every token.\n  Use compose."
            )
        check_fit({"outer": self.outer, "inner": self.inner})

    @property
    def inside(self) -> tuple[TokenObjective, ...]:
        return self.outer, self.inner

    def init_state(self) -> State:
        return {"outer": self.outer.init_state(), "inner": self.inner.init_state()}

    def _settling(self, parts: Sequence[TokenBatch], state: State, local: bool) -> Rounds[tuple[Settled, State]]:
        outer_stat, outer_state = yield from self.outer._settling(parts, state["outer"], local)
        left = [part.select(_kept(part, terms_of(self.outer, part, outer_stat, outer_state))) for part in parts]
        inner_stat, inner_state = yield from self.inner._settling(left, state["inner"], local)
        stats = Settled({"outer": outer_stat, "inner": inner_stat})
        return stats, {"outer": outer_state, "inner": inner_state}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        outer = terms_of(self.outer, batch, stat.member("outer"), state["outer"])
        keep = _kept(batch, outer)
        inner = terms_of(self.inner, batch.select(keep), stat.member("inner"), state["inner"])
        return merge_terms({"outer": outer, "inner": _spread(inner, keep)})

    def _member_terms(self, batch: TokenBatch, stat: Settled, state: State, key: str = "") -> dict[str, Member]:
        outer = self.outer._member_terms(batch, stat.member("outer"), state["outer"], _under(key, "outer"))
        keep = _kept(batch, merge_terms({name: member.terms for name, member in outer.items()}))
        inner_batch = batch.select(keep)
        inner = self.inner._member_terms(inner_batch, stat.member("inner"), state["inner"], _under(key, "inner"))
        return outer | {name: replace(member, terms=_spread(member.terms, keep)) for name, member in inner.items()}

    def _leaves(self, around: tuple[Leaf, ...], observed: bool) -> Iterator[Leaf]:
        outer = tuple(self.outer._leaves(around, observed))
        yield from outer
        yield from self.inner._leaves((*around, *outer), observed)

    def __repr__(self) -> str:
        return f"within({self.outer!r}, {self.inner!r})"


def compose(*methods: TokenObjective) -> Composition:
    """Merge methods into one objective.

    Closed (a composition composes again), associative and independent of order. Without a method it is the plain
    importance-weighted policy gradient, averaged over tokens.

    Raises:
        MethodError: something given is not a method; the message says what to write instead.
        Conflict: two methods own one slot, disagree about a signal, or exclude each other.
    """
    return Composition(methods)


def within(outer: TokenObjective, inner: TokenObjective) -> Within:
    """The explicit exception to free order: ``inner`` measures and changes only tokens that ``outer`` keeps.

    ``within(S2TMask(), STARE())`` takes STARE's top share among the tokens that S2T keeps.

    Raises:
        Conflict: ``inner`` owns a slot, or ``outer`` never drops a token.
    """
    return Within(outer, inner)


@final
class Observe(Combinator, combinator=True):
    """``method`` without effect. Make it with :func:`observe`.

    Its metrics are under ``observe_NAME/``: those of the method, and the shares ``would_drop``, ``would_boost``,
    ``would_damp``, ``would_unclip`` and ``would_penalise`` of all tokens, the mean ``would_add`` to the advantage,
    ``would_scale_lr``, and for a trust region the mean of its gate and the share that it would stop, of the tokens that
    pull. Statistics and state are those that it would have.
    """

    method: TokenObjective
    name = "observe"
    live_needs = frozenset[str]()

    def __post_init__(self) -> None:
        check_methods("observe", (self.method,))
        slots = sorted(self.method.writes & {"support", "ratio", "aggregate"})
        if slots:
            raise Conflict(
                f"observe('{self.method.name}'): it defines the {slots[0]} of every token.\n  Compare two runs instead."
            )

    @property
    def inside(self) -> tuple[TokenObjective, ...]:
        return (self.method,)

    @property
    def _label(self) -> str:
        return f"observe_{self.method._label}"

    @property
    def writes(self) -> Set[str]:
        return frozenset({"gates"} if self.method.writes & {"gates", "bounds", "surrogate"} else ())

    def _leaves(self, around: tuple[Leaf, ...], observed: bool) -> Iterator[Leaf]:
        return self.method._leaves(around, observed) if observed else super()._leaves(around, observed)

    def in_words(self) -> Mapping[str, str]:
        return {"report": f"Measure and report what `{self.method.name}` would do, and change nothing."}

    def init_state(self) -> State:
        return self.method.init_state()

    def _settling(self, parts: Sequence[TokenBatch], state: State, local: bool) -> Rounds[tuple[Settled, State]]:
        return self.method._settling(parts, state, local)

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        would = terms_of(self.method, batch, stat, state)
        gates = {name: replace(gate, acts=False) for name, gate in would.gates.items()}
        if (bounds := would.bounds) is not None:

            def clip(ratio: Tensor, constants: Constants) -> Tensor:
                stopped = torch.stack(list(bounds.stops(ratio, constants.advantages).values())).any(0)
                return (~stopped).to(ratio.dtype)

            gates["clip"] = Gate(clip, acts=False)
        if (surrogate := would.surrogate) is not None:
            gates["surrogate"] = Gate(
                lambda ratio, constants: surrogate.fn(ratio, constants) / ratio, surrogate.whole_sequences, acts=False
            )
        return Terms(gates=gates, report={**would.report, **_effects(would, batch)})

    def __repr__(self) -> str:
        return f"observe({self.method!r})"


def observe(method: TokenObjective) -> Observe | Composition:
    """Measure and report what ``method`` would do, and change nothing: neither loss nor gradient nor learning rate.

    ``compose(ClipHigher(), observe(STARE()))`` trains only by clip-higher and logs how many tokens STARE would boost.
    Each member of a composition is observed separately.

    Raises:
        MethodError: it is not a method.
        Conflict: it defines the ratio or the aggregation, which has no tokens to count.
    """
    if isinstance(method, Composition):
        return compose(*(member if isinstance(member, Observe) else Observe(member) for member in method.members))
    return method if isinstance(method, Observe) else Observe(method)


def numbered(named: Sequence[tuple[str, Item]]) -> dict[str, Item]:
    """Items by their names, each with a number where several have one name."""
    count = Counter(name for name, _ in named)
    items: dict[str, Item] = {}
    for name, item in named:
        numbers = (f"{name}_{number}" for number in itertools.count(1))
        free = (key for key in numbers if key not in count and key not in items)
        items[next(free) if count[name] > 1 else name] = item
    return items


def walk(objective: TokenObjective, *, observed: bool = False) -> Iterator[Leaf]:
    """The methods of an objective in its order, those inside `within` too.

    With ``observed``, those inside `observe` too; without it, an `observe` is a single leaf.
    """
    return objective._leaves((), observed)


def _has_leaf(state: State) -> bool:
    """Whether the state holds a value: a combinator without state still has a mapping per member."""
    return any(_has_leaf(value) if isinstance(value, Mapping) else True for value in state.values())


def _under(key: str, part: str) -> str:
    return f"{key}/{part}" if key else part


def _kept(batch: TokenBatch, terms: Terms) -> Tensor:
    return torch.ones_like(batch.sequence, dtype=torch.bool) if terms.keep is None else terms.keep


def _spread(terms: Terms, keep: Tensor) -> Terms:
    """Terms of the kept tokens as terms of all tokens, with the identity for the others."""

    def over(values: Tensor | None, identity: float | bool) -> Tensor | None:
        if values is None:
            return None
        return torch.full_like(keep, identity, dtype=values.dtype).masked_scatter(keep, values)

    def per_token(term: Any, identity: float) -> Any:
        """A gate or a penalty for all tokens; both take what they differentiate or weigh, and constants."""

        def fn(live: Tensor | PolicyOutputs, constants: Any) -> Tensor:
            selected = live[keep] if isinstance(live, Tensor) else live.select(keep)
            values = term.fn(selected, constants.select(keep))
            return torch.full_like(keep, identity, dtype=values.dtype).masked_scatter(keep, values)

        return replace(term, fn=fn, where=keep if term.where is None else over(term.where, False))

    return replace(
        terms,
        keep=over(terms.keep, True),
        weight=over(terms.weight, 1.0),
        bonus=over(terms.bonus, 0.0),
        unclipped=over(terms.unclipped, False),
        gates={name: per_token(gate, 1.0) for name, gate in terms.gates.items()},
        penalties={name: per_token(penalty, 0.0) for name, penalty in terms.penalties.items()},
    )


def _effects(would: Terms, batch: TokenBatch) -> dict[str, Mean]:
    weight, keep = would.weight, would.keep
    counted: dict[str, Tensor | None] = {
        "would_drop": None if keep is None else ~keep,
        "would_boost": None if weight is None else weight > 1,
        "would_damp": None if weight is None else weight < 1,
        "would_add": would.bonus,
        "would_unclip": would.unclipped,
    }
    for name, penalty in would.penalties.items():
        if penalty.coefficient != 0:
            where = torch.ones_like(batch.sequence, dtype=torch.bool) if penalty.where is None else penalty.where
            counted[_under(name, "would_penalise")] = where
    effects = {name: Mean.of(values) for name, values in counted.items() if values is not None}
    return effects if would.lr_scale is None else effects | {"would_scale_lr": Mean.scalar(would.lr_scale)}
