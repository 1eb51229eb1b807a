"""Composition is closed: methods merge into one objective, whatever the order in which they are listed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor

from rlstab.core.batch import PolicyOutputs, TokenBatch
from rlstab.core.comm import Comm
from rlstab.core.loss import LossOutput
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import Plan, make_plan
from rlstab.core.stats import Settled
from rlstab.core.terms import SLOTS, Penalty, Terms, merge_terms, two_owners
from rlstab.errors import Conflict, NonFinite


@final
@dataclass(frozen=True)
class Composition(TokenObjective):
    """Several methods as one. Make it with :func:`compose`; ``str`` shows who contributes to which field."""

    members: tuple[TokenObjective, ...]
    name: ClassVar[str] = "composition"

    def __post_init__(self) -> None:
        flat = [one for member in self.members for one in _flatten(member)]
        flat.sort(key=lambda one: (one.name, repr(one)))
        object.__setattr__(self, "members", tuple(flat))
        _check(self.keyed)

    @cached_property
    def keyed(self) -> Mapping[str, TokenObjective]:
        """Members by key: the name, with a number where one name stands several times."""
        several = {name for name, count in Counter(one.name for one in self.members).items() if count > 1}
        names = {one.name for one in self.members}
        keyed: dict[str, TokenObjective] = {}
        for one in self.members:
            numbered = (f"{one.name}_{number}" for number in itertools.count(1))
            free = (key for key in numbered if key not in names and key not in keyed)
            keyed[next(free) if one.name in several else one.name] = one
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
    def trust_region(self) -> bool:
        return all(one.trust_region for one in self.members)

    def init_state(self) -> State:
        return {key: one.init_state() for key, one in self.keyed.items()}

    def settle(self, parts: Sequence[TokenBatch], state: State, comm: Comm) -> tuple[Settled, State]:
        settled = {key: one.settle(parts, state[key], comm) for key, one in self.keyed.items()}
        return {key: stat for key, (stat, _) in settled.items()}, {key: new for key, (_, new) in settled.items()}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        # a statistic is a summary or, of a combinator, a mapping of them; the keys say which, the types do not
        return merge_terms(
            {key: one.terms(batch, stat[key], state[key]) for key, one in self.keyed.items()}  # type: ignore[arg-type]
        )

    def __call__(
        self,
        batch: TokenBatch,
        policy: PolicyOutputs,
        *,
        state: State | None = None,
        anchor: PolicyOutputs | None = None,
    ) -> LossOutput:
        """The loss of a whole optimizer step in one batch. For a step in parts, or state over steps, `make_plan`.

        Raises:
            NonFinite: NaN or Inf in the evidence or in the live outputs.
        """
        out = make_plan(self, [batch], state).loss(batch, policy, anchor=anchor)
        if int(out.nonfinite):
            raise NonFinite(
                f"live outputs of the policy are NaN or Inf on {int(out.nonfinite)} tokens. The loss was not computed; "
                f"look at the weights or at the learning rate of the last step."
            )
        return out

    def __repr__(self) -> str:
        return f"compose({', '.join(map(repr, self.members))})"

    def __str__(self) -> str:
        width = max((len(key) for key in self.keyed), default=0)
        return "\n".join(
            f"{key:<{width}}  {', '.join(sorted(one.writes)):<24}  {one!r}" for key, one in self.keyed.items()
        )


@final
@dataclass(frozen=True)
class Within(TokenObjective):
    """``inner`` sees only the tokens that ``outer`` keeps. Make it with :func:`within`."""

    outer: TokenObjective
    inner: TokenObjective
    name: ClassVar[str] = "within"

    def __post_init__(self) -> None:
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
        _check({"outer": self.outer, "inner": self.inner})

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
    def trust_region(self) -> bool:
        return self.outer.trust_region

    def init_state(self) -> State:
        return {"outer": self.outer.init_state(), "inner": self.inner.init_state()}

    def settle(self, parts: Sequence[TokenBatch], state: State, comm: Comm) -> tuple[Settled, State]:
        outer_stat, outer_state = self.outer.settle(parts, state["outer"], comm)
        with torch.no_grad():
            left = [part.select(_kept(part, self.outer.terms(part, outer_stat, outer_state))) for part in parts]
        inner_stat, inner_state = self.inner.settle(left, state["inner"], comm)
        return {"outer": outer_stat, "inner": inner_stat}, {"outer": outer_state, "inner": inner_state}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        # as in Composition: which statistics are mappings is in the keys, not in the types
        outer = self.outer.terms(batch, stat["outer"], state["outer"])  # type: ignore[arg-type]
        kept = _kept(batch, outer)
        inner = self.inner.terms(batch.select(kept), stat["inner"], state["inner"])  # type: ignore[arg-type]
        return merge_terms({"outer": outer, "inner": _spread(inner, kept)})

    def __repr__(self) -> str:
        return f"within({self.outer!r}, {self.inner!r})"


def compose(*methods: TokenObjective) -> Composition:
    """Merge methods into one objective.

    Closed (a composition composes again), associative and free of order. Without any method it is the plain
    importance-weighted policy gradient, averaged over tokens.

    Raises:
        Conflict: two methods own one slot, disagree about a signal, or exempt tokens from a trust region that the
            surrogate does not have.
    """
    return Composition(methods)


def within(outer: TokenObjective, inner: TokenObjective) -> Within:
    """The explicit exception to free order: ``inner`` measures and touches only tokens that ``outer`` keeps.

    ``within(S2TMask(), STARE())`` takes STARE's top share among the tokens that S2T left alive.

    Raises:
        Conflict: ``inner`` owns a slot, or ``outer`` never drops a token.
    """
    return Within(outer, inner)


@dataclass(frozen=True, eq=False)
class Member:
    """What one method asks for on one part of a step, beside the others.

    Attributes:
        name: of the method.
        terms: over all tokens of the part, also where the method saw only those that another one kept.
    """

    name: str
    terms: Terms


def member_terms(plan: Plan, batch: TokenBatch) -> dict[str, Member]:
    """The terms of each method of a plan on one of its parts, before they are merged; made anew at each call.

    Keys are the prefixes of the methods' metrics: those of :attr:`Composition.keyed`, inside :func:`within` followed by
    ``/outer`` and ``/inner``.
    """
    with torch.no_grad():
        return _members("", plan.objective, batch, plan.settled(batch), plan.state)


def _members(key: str, method: TokenObjective, batch: TokenBatch, stat: Settled, state: State) -> dict[str, Member]:
    def inside(part: str, one: TokenObjective, seen: TokenBatch) -> dict[str, Member]:
        return _members(f"{key}/{part}" if key else part, one, seen, stat[part], state[part])  # type: ignore[arg-type]

    if isinstance(method, Composition):
        return {name: one for part, member in method.keyed.items() for name, one in inside(part, member, batch).items()}
    if isinstance(method, Within):
        outer = inside("outer", method.outer, batch)
        kept = _kept(batch, merge_terms({name: one.terms for name, one in outer.items()}))
        inner = inside("inner", method.inner, batch.select(kept))
        return outer | {name: replace(one, terms=_spread(one.terms, kept)) for name, one in inner.items()}
    return {key or method.name: Member(method.name, method.terms(batch, stat, state))}


def _flatten(method: TokenObjective) -> tuple[TokenObjective, ...]:
    return method.members if isinstance(method, Composition) else (method,)


def _check(keyed: Mapping[str, TokenObjective]) -> None:
    owner: dict[str, str] = {}
    for key, method in keyed.items():
        for slot in sorted(method.writes & set(SLOTS)):
            if slot in owner:
                raise two_owners(owner[slot], key, slot)
            owner[slot] = key
    options: dict[str, tuple[str, float]] = {}
    for key, method in keyed.items():
        for name, value in method.signal_options.items():
            if name in options and options[name][1] != value:
                raise Conflict(
                    f"'{options[name][0]}' and '{key}' read one signal defined with different numbers: {name} = "
                    f"{options[name][1]} and {value}.\n  Give both the same {name}."
                )
            options[name] = key, value
    boundless = next((key for key, method in keyed.items() if not method.trust_region), None)
    exempting = next((key for key, method in keyed.items() if "exempt" in method.writes), None)
    if boundless is not None and exempting is not None:
        raise Conflict(
            f"'{exempting}' exempts tokens from the trust region, and the surrogate of '{boundless}' has none.\n"
            f"  Remove one of them."
        )


def _kept(batch: TokenBatch, terms: Terms) -> Tensor:
    return torch.ones_like(batch.sequence, dtype=torch.bool) if terms.keep is None else terms.keep


def _spread(terms: Terms, kept: Tensor) -> Terms:
    """Terms about the kept tokens, as terms about all of them: the identity on the others."""

    def over(values: Tensor | None, identity: float | bool) -> Tensor | None:
        if values is None:
            return None
        return torch.full_like(kept, identity, dtype=values.dtype).masked_scatter(kept, values)

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
        penalties={name: penalty(one) for name, one in terms.penalties.items()},
    )
