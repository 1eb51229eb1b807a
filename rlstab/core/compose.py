"""Composition is closed: methods merge into one objective, whatever the order in which they are listed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm
from rlstab.core.fit import check_fit, check_methods
from rlstab.core.loss import LossOutput
from rlstab.core.objective import Member, State, TokenObjective, ask
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled
from rlstab.core.terms import SLOTS, Gate, Held, Penalty, Terms, merge_terms
from rlstab.errors import Conflict, NonFinite, OutOfRange


@final
@dataclass(frozen=True)
class Composition(TokenObjective, combinator=True):
    """Several methods as one. Make it with :func:`compose`; ``str`` shows who contributes to which field."""

    members: tuple[TokenObjective, ...]
    name: ClassVar[str] = "composition"

    def __post_init__(self) -> None:
        check_methods("compose", self.members)
        flat = [one for member in self.members for one in _flatten(member)]
        flat.sort(key=lambda one: (one.label, repr(one)))
        object.__setattr__(self, "members", tuple(flat))
        check_fit(self.keyed)

    @cached_property
    def keyed(self) -> Mapping[str, TokenObjective]:
        """Members by key: the label, numbered where a label occurs several times."""
        several = {label for label, count in Counter(one.label for one in self.members).items() if count > 1}
        labels = {one.label for one in self.members}
        keyed: dict[str, TokenObjective] = {}
        for one in self.members:
            numbered = (f"{one.label}_{number}" for number in itertools.count(1))
            free = (key for key in numbered if key not in labels and key not in keyed)
            keyed[next(free) if one.label in several else one.label] = one
        return keyed

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(one.needs for one in self.members))

    @property
    def live_needs(self) -> frozenset[str]:
        return frozenset().union(*(one.live_needs for one in self.members))

    @property
    def writes(self) -> frozenset[str]:
        return frozenset().union(*(one.writes for one in self.members))

    @property
    def signal_options(self) -> Mapping[str, float]:
        return {name: value for one in self.members for name, value in one.signal_options.items()}

    @property
    def reads_policies(self) -> frozenset[str]:
        return frozenset().union(*(one.reads_policies for one in self.members))

    @property
    def reads_drift(self) -> frozenset[str]:
        return frozenset().union(*(one.reads_drift for one in self.members))

    def acting(self) -> Iterator[TokenObjective]:
        for one in self.members:
            yield from one.acting()

    def init_state(self) -> State:
        return {key: one.init_state() for key, one in self.keyed.items()}

    def settle(self, parts: Sequence[TokenBatch], state: State, comm: Comm) -> tuple[Settled, State]:
        settled = {key: one.settle(parts, state[key], comm) for key, one in self.keyed.items()}
        stats = Settled({key: stat for key, (stat, _) in settled.items()})
        return stats, {key: new for key, (_, new) in settled.items()}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return merge_terms({key: ask(one, batch, stat.member(key), state[key]) for key, one in self.keyed.items()})

    def asked(self, batch: TokenBatch, stat: Settled, state: State, key: str = "") -> dict[str, Member]:
        return {
            name: asked
            for own, one in self.keyed.items()
            for name, asked in one.asked(batch, stat.member(own), state[own], _under(key, own)).items()
        }

    def __call__(
        self,
        batch: TokenBatch,
        policy: PolicyOutputs,
        *,
        state: State | None = None,
        anchor: PolicyOutputs | None = None,
    ) -> LossOutput:
        """The loss of a whole optimizer step in one batch. For one in parts, see `make_plan`.

        Args:
            batch: the evidence of the optimizer step.
            policy: live outputs for its tokens.
            state: :meth:`init_state` in the first optimizer step, ``state`` of the last output afterwards. Needed where
                a member has state or scales the learning rate, which the output carries as ``lr_scale``.
            anchor: see :meth:`Plan.loss`.

        Raises:
            OutOfRange: there is no state where it is needed.
            NonFinite: NaN or Inf in the evidence, in the live outputs or in a gate.
        """
        if state is None:
            self._require_no_state()
        out = make_plan(self, [batch], state).loss(batch, policy, anchor=anchor)
        if int(out.nonfinite):
            raise NonFinite(
                f"live outputs of the policy, or a gate made of them, are NaN or Inf on {int(out.nonfinite)} tokens. "
                f"The loss was not computed; look at the weights or at the learning rate of the last step."
            )
        return out

    def _require_no_state(self) -> None:
        """A state that nobody carries over silently stays the first one forever."""
        for key, one in self.keyed.items():
            stateful = _has_leaf(one.init_state())
            if stateful or "lr_scale" in one.writes:
                why = "has state" if stateful else "scales the learning rate"
                raise OutOfRange(
                    f"'{key}' {why}, and the objective was called without state=. Begin with state = "
                    f"objective.init_state(); in each optimizer step write out = objective(batch, policy, "
                    f"state=state), then state = out.state, and multiply the learning rate by out.lr_scale."
                )

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.members))})"

    def __str__(self) -> str:
        width = max((len(key) for key in self.keyed), default=0)
        return "\n".join(
            f"{key:<{width}}  {', '.join(sorted(one.writes)):<24}  {one!r}" for key, one in self.keyed.items()
        )


@final
@dataclass(frozen=True)
class Within(TokenObjective, combinator=True):
    """``inner`` sees only the tokens that ``outer`` keeps. Make it with :func:`within`."""

    outer: TokenObjective
    inner: TokenObjective
    name: ClassVar[str] = "within"

    def __post_init__(self) -> None:
        check_methods("within", (self.outer, self.inner))
        slots = sorted(self.inner.writes & {*SLOTS, "lr_scale"})
        if slots:
            raise Conflict(
                f"within('{self.outer.name}', '{self.inner.name}'): the inner method defines the {', '.join(slots)}, "
                f"which belongs to all tokens.\n  Compose '{self.inner.name}' beside it instead."
            )
        if "keep" not in self.outer.writes:
            raise Conflict(
                f"within('{self.outer.name}', '{self.inner.name}'): the outer method keeps every token, so it limits "
                f"nothing.\n  Use compose, or an outer method that writes 'keep'."
            )
        check_fit({"outer": self.outer, "inner": self.inner})

    @property
    def needs(self) -> frozenset[str]:
        return self.outer.needs | self.inner.needs

    @property
    def live_needs(self) -> frozenset[str]:
        return self.outer.live_needs | self.inner.live_needs

    @property
    def writes(self) -> frozenset[str]:
        return self.outer.writes | self.inner.writes

    @property
    def signal_options(self) -> Mapping[str, float]:
        return {**self.outer.signal_options, **self.inner.signal_options}

    @property
    def reads_policies(self) -> frozenset[str]:
        return self.outer.reads_policies | self.inner.reads_policies

    @property
    def reads_drift(self) -> frozenset[str]:
        return self.outer.reads_drift | self.inner.reads_drift

    def acting(self) -> Iterator[TokenObjective]:
        yield from self.outer.acting()
        yield from self.inner.acting()

    def init_state(self) -> State:
        return {"outer": self.outer.init_state(), "inner": self.inner.init_state()}

    def settle(self, parts: Sequence[TokenBatch], state: State, comm: Comm) -> tuple[Settled, State]:
        outer_stat, outer_state = self.outer.settle(parts, state["outer"], comm)
        with torch.no_grad():
            left = [part.select(_kept(part, ask(self.outer, part, outer_stat, outer_state))) for part in parts]
        inner_stat, inner_state = self.inner.settle(left, state["inner"], comm)
        stats = Settled({"outer": outer_stat, "inner": inner_stat})
        return stats, {"outer": outer_state, "inner": inner_state}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        outer = ask(self.outer, batch, stat.member("outer"), state["outer"])
        kept = _kept(batch, outer)
        inner = ask(self.inner, batch.select(kept), stat.member("inner"), state["inner"])
        return merge_terms({"outer": outer, "inner": _spread(inner, kept)})

    def asked(self, batch: TokenBatch, stat: Settled, state: State, key: str = "") -> dict[str, Member]:
        outer = self.outer.asked(batch, stat.member("outer"), state["outer"], _under(key, "outer"))
        kept = _kept(batch, merge_terms({name: one.terms for name, one in outer.items()}))
        seen = batch.select(kept)
        inner = self.inner.asked(seen, stat.member("inner"), state["inner"], _under(key, "inner"))
        return outer | {name: replace(one, terms=_spread(one.terms, kept)) for name, one in inner.items()}

    def __repr__(self) -> str:
        return f"within({self.outer!r}, {self.inner!r})"


def compose(*methods: TokenObjective) -> Composition:
    """Merge methods into one objective.

    Closed (a composition composes again), associative and free of order. Without any method it is the plain
    importance-weighted policy gradient, averaged over tokens.

    Raises:
        MethodError: something given is not a method; the message says what to write instead.
        Conflict: two methods own one slot, disagree about a signal, or exclude each other.
    """
    return Composition(methods)


def within(outer: TokenObjective, inner: TokenObjective) -> Within:
    """The explicit exception to free order: ``inner`` measures and touches only tokens that ``outer`` keeps.

    ``within(S2TMask(), STARE())`` takes STARE's top share among the tokens that S2T keeps.

    Raises:
        Conflict: ``inner`` owns a slot, or ``outer`` never drops a token.
    """
    return Within(outer, inner)


def _flatten(method: TokenObjective) -> tuple[TokenObjective, ...]:
    return method.members if isinstance(method, Composition) else (method,)


def _has_leaf(state: State) -> bool:
    """It holds a value: a combinator without state still has a mapping per member."""
    return any(_has_leaf(one) if isinstance(one, Mapping) else True for one in state.values())


def _under(key: str, part: str) -> str:
    return f"{key}/{part}" if key else part


def _kept(batch: TokenBatch, terms: Terms) -> Tensor:
    return torch.ones_like(batch.sequence, dtype=torch.bool) if terms.keep is None else terms.keep


def _spread(terms: Terms, kept: Tensor) -> Terms:
    """Terms about the kept tokens, as terms about all of them: the identity on the others."""

    def over(values: Tensor | None, identity: float | bool) -> Tensor | None:
        if values is None:
            return None
        return torch.full_like(kept, identity, dtype=values.dtype).masked_scatter(kept, values)

    def gate(one: Gate) -> Gate:
        def fn(ratio: Tensor, held: Held) -> Tensor:
            values = one.fn(ratio[kept], held.select(kept))
            return torch.ones_like(ratio).masked_scatter(kept, values.to(ratio.dtype))

        return replace(one, fn=fn, where=kept)

    def penalty(one: Penalty) -> Penalty:
        def fn(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            values = one.fn(policy.select(kept), anchor.select(kept))
            return torch.zeros_like(kept, dtype=values.dtype).masked_scatter(kept, values)

        return replace(one, fn=fn, where=kept if one.where is None else over(one.where, False))

    return replace(
        terms,
        keep=over(terms.keep, True),
        weight=over(terms.weight, 1.0),
        bonus=over(terms.bonus, 0.0),
        exempt=over(terms.exempt, False),
        gates={name: gate(one) for name, one in terms.gates.items()},
        penalties={name: penalty(one) for name, one in terms.penalties.items()},
    )
