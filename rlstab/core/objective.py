"""The interface of methods, which contribute terms made from evidence to one loss, and whether methods fit together."""

from __future__ import annotations

import re
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any

from rlstab.core.batch import BASICS, TokenBatch
from rlstab.core.loss import LossOutput
from rlstab.core.metadata import card
from rlstab.core.method import Method, State
from rlstab.core.method_checks import COMBINATORS, SETS, check_declared, checked_terms
from rlstab.core.method_settings import settings_of
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled
from rlstab.core.terms import SLOTS, WRITABLE, Terms
from rlstab.errors import Conflict, FitWarning, MethodError, MissingSignal, NonFinite

__all__ = ["Member", "State", "TokenObjective", "active_methods", "require_signals", "terms_of"]

#: Values of settings that a sentence spells in another way than Python.
_SPELLED = {"None": "none", "True": "yes", "False": "no"}
#: Fields that a method writes if it acts by how far the ratio is from 1.
TRUST_REGION = frozenset({"ratio", "bounds", "surrogate", "gates"})
#: Differences between two policies, by the evidence that a method reads to see them.
_COMPARED = {
    "sampler": {"old_logprobs", "rollout_logprobs"},
    "step": {"logprobs", "old_logprobs"},
    "start": {"logprobs", "rollout_logprobs"},
}


class TokenObjective(Method[TokenBatch]):
    """A method: what it asks for, given the evidence, the statistics of the optimizer step and its state.

    The annotated fields of a class are its settings. Only a name and :meth:`terms` are required. Everything runs
    without gradient: what a method returns are decisions, and gradients live only in the functions inside
    :class:`~rlstab.core.terms.Terms`.

    Its state advances before its terms are made: the state of an optimizer step is the one with which it is made.

    Attributes:
        needs: evidence that it reads: signals, and ``logprobs`` and ``old_logprobs`` where it looks at those policies.
            The ratio does not count: the loss computes it, without a forward by the host.
        live_needs: outputs of the live policy that its penalties differentiate, beyond the log-probs.
        writes: fields of Terms that it may fill.
        signal_options: numbers that define a signal it reads, such as ``min_p`` of ``log_kept_mass``.
        excludes: methods by name, or fields of Terms that another method fills, with which it cannot be composed, each
            with the reason.
    """

    _acts_by = "terms"

    if not TYPE_CHECKING:  # see Method
        live_needs = writes = frozenset()
        excludes, signal_options = {}, {}

        @property
        def reads_drift(self) -> Set[str]:
            """Which policies it compares (:data:`rlstab.core.method_checks.DRIFT`); it is idle where they are the same.

            Unset settings of a run follow from it. It follows from what is read and written; a penalty that makes its
            own ratio to the old policy has to say so. The live policy differs from the sampler in every run, if only by
            its kernels, so a trust region around what the sampler reported is never idle.
            """
            compared = {name for name, pair in _COMPARED.items() if pair <= self.needs}
            if self.writes & TRUST_REGION and "rollout_logprobs" not in self.needs:
                compared.add("live")
            return compared

    def in_words(self) -> Mapping[str, str]:
        """What it does to a token: sentences for each field of Terms that it may fill, with its settings.

        They are those of the section *Writes* of the docstring, each setting replaced by its value. Without such a
        section it is the first line of the docstring, with all settings, under one of the fields, or under ``report``
        where it fills none.
        """
        values = {setting.name: str(getattr(self, setting.name)) for setting in settings_of(type(self))}
        spelled = {name: _SPELLED.get(value, value) for name, value in values.items()}
        words = {
            field: re.sub(r"``(\w+)``", lambda match: spelled.get(match[1], f"`{match[1]}`"), sentence)
            for field, sentence in sorted(card(type(self)).written.items())
            if field in self.writes
        }
        return words or dict.fromkeys(sorted(self.writes)[:1] or ["report"], self._summary())

    @abstractmethod
    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        """What this method asks for on one part of the step."""

    def __call__(self, batch: TokenBatch, policy: PolicyOutputs, *, state: State | None = None) -> LossOutput:
        """The loss of a whole optimizer step in one batch. For a step in parts, see `make_plan`.

        Args:
            batch: the evidence of the optimizer step.
            policy: live outputs for its tokens.
            state: :meth:`init_state` in the first optimizer step, ``state`` of the last output afterwards. Needed where
                a member has state or scales the learning rate, which the output carries as ``lr_scale``.

        Raises:
            OutOfRange: a state is needed and missing.
            NonFinite: NaN or Inf in the evidence, in the live outputs or in a gate.
        """
        from rlstab import compose, make_plan  # these import this module

        composition = compose(self)
        wrapped = composition != self  # a composition composes to itself
        if state is None:
            composition.require_no_state()
        elif wrapped:
            state = {self._label: state}
        out = make_plan(composition, [batch], state).loss(batch, policy)
        if int(out.nonfinite):
            raise NonFinite(
                f"live outputs, or a gate or a loss made of them, are NaN, Inf or impossible (a log-prob above 0) on "
                f"{int(out.nonfinite)} tokens. Look at weights, learning rate, and how log-probs are made."
            )
        return replace(out, state=out.state[self._label]) if wrapped else out

    def _leaves(self, around: tuple[Leaf, ...], observed: bool) -> Iterator[Leaf]:
        """See :func:`rlstab.core.compose.walk`; combinators override it to give the methods that they contain."""
        yield Leaf(self, around)

    def _empty_part(self) -> TokenBatch:
        return TokenBatch.empty(self.needs)

    def _member_terms(self, batch: TokenBatch, stat: Settled, state: State, key: str = "") -> dict[str, Member]:
        """What it asks for on one part before the merge, by the prefix of its metrics.

        Combinators override it to give this for each member.
        """
        return {key or self._label: Member(self.name, terms_of(self, batch, stat, state))}


@dataclass(frozen=True, eq=False)
class Leaf:
    """A method and the methods within which it acts.

    Attributes:
        method: neither a composition nor a `within`; an `observe` represents what it observes.
        around: the methods whose kept tokens are the only ones that it sees, outermost first.
    """

    method: TokenObjective
    around: tuple[Leaf, ...] = ()

    @property
    def name(self) -> str:
        """What the method is called: its label, which is its name unless it is only observed."""
        return self.method._label


@dataclass(frozen=True, eq=False)
class Member:
    """What one method of a composition asks for on one part of an optimizer step.

    Attributes:
        name: the name of the method.
        terms: over all tokens of the part, even if the method saw only those that another one kept.
    """

    name: str
    terms: Terms


def terms_of(method: TokenObjective, batch: TokenBatch, stat: Settled, state: State) -> Terms:
    """The terms of a method on one part, checked.

    Raises:
        MethodError: see :func:`rlstab.core.method_checks.checked_terms`.
    """
    terms = method.terms(batch, stat, state)
    return terms if method.name in COMBINATORS else checked_terms(method.name, terms, batch, method.writes)


def active_methods(objective: TokenObjective) -> Iterator[TokenObjective]:
    """The methods that act on the loss: the objective itself, or what a combinator contains."""
    return (leaf.method for leaf in objective._leaves((), observed=False) if leaf.method.name != "observe")


def require_signals(
    objective: TokenObjective,
    *,
    provides: Set[str],
    live: Set[str],
    host: str,
    cure: Callable[[str, bool], str] = lambda name, live: "use a host that provides it",
) -> None:
    """Check, before anything runs, that a host provides what an objective reads.

    Args:
        objective: usually a composition.
        provides: signals of the evidence that the host can give beyond the basic ones.
        live: outputs of the live policy that it can differentiate beyond the log-probs.
        host: what the error calls the host.
        cure: what to do about a missing signal, or live output, instead of removing the method.

    Raises:
        MissingSignal: names the method that reads it.
    """
    members: Mapping[str, TokenObjective] = getattr(objective, "keyed", {objective.name: objective})
    for key, method in members.items():
        for kind, needs, provided in (("", method.needs, provides), ("the live ", method.live_needs, live)):
            for missing in sorted(needs - provided - BASICS):
                raise MissingSignal(
                    f"'{key}' reads {kind}'{missing}', which {host} does not provide. It provides: "
                    f"{', '.join(sorted(provided)) or 'none'}. Remove '{key}', or {cure(missing, bool(kind))}."
                )


def check_methods(caller: str, items: Sequence[object]) -> None:
    """Refuse what is not a method.

    Raises:
        MethodError: with what to write instead.
    """
    for item in items:
        if not isinstance(item, TokenObjective):
            raise MethodError(
                f"{caller} was given {item!r:.60}, expected a method, such as S2TMask(). Spread a list; of the name "
                f"of a method or a preset, load_objective makes one."
            )
        for attribute in SETS:
            check_declared(type(item).__qualname__, attribute, getattr(item, attribute))


def check_fit(keyed: Mapping[str, TokenObjective]) -> None:
    """Check members that act side by side.

    Raises:
        Conflict: two own one slot, define one signal differently, or exclude each other; names both, and the fix.
    """
    owner: dict[str, str] = {}
    for key, method in keyed.items():
        for slot in sorted(method.writes & set(SLOTS)):
            if slot in owner:
                raise Conflict(
                    f"'{owner[slot]}' and '{key}' both define the {slot}; only one method can.\n  Remove one of them."
                )
            owner[slot] = key
    options: dict[str, tuple[str, float]] = {}
    for key, method in keyed.items():
        for name, value in method.signal_options.items():
            first, before = options.setdefault(name, (key, value))
            if before != value:
                raise Conflict(
                    f"'{first}' and '{key}' read one signal by {name} = {before} and {value}.\n  Give both the same."
                )
    for method, other in permutations([leaf for member in keyed.values() for leaf in active_methods(member)], 2):
        reasons = [reason for named, reason in method.excludes.items() if named == other.name or named in other.writes]
        if "surrogate" in method.writes and "bounds" in other.writes:
            reasons.append("the first replaces the ratio of a token in the gradient, and a trust region bounds it.")
        if reasons:
            raise Conflict(
                f"'{method.name}' and '{other.name}' exclude each other: {reasons[0]}\n  Remove one of them."
            )


def check_complete(objective: TokenObjective) -> None:
    """Warn (:class:`FitWarning`) of what members lack, once a loss is made: until then a composition may grow."""
    for text in unmet(objective):
        warnings.warn(text, FitWarning, stacklevel=3)


def no_fit_warnings() -> warnings.catch_warnings[None]:
    """For a method that is tried alone, and where :func:`unmet` is reported in another way."""
    return warnings.catch_warnings(action="ignore", category=FitWarning)


def unmet(objective: TokenObjective) -> list[str]:
    """A sentence for each method that lacks what it was published with."""
    acting = list(active_methods(objective))
    names = {method.name for method in acting}.union(*(method.writes for method in acting))
    return unmet_in(acting, names)


def unmet_in(methods: Iterable[Method[Any]], names: Set[str]) -> list[str]:
    """A sentence for each method or stage that was published with something that is not among the names."""
    return [
        f"'{method.name}' expects {f'a method that writes {expected!r}' if expected in WRITABLE else repr(expected)} "
        f"in the run, which is missing: {reason}"
        for method in methods
        for expected, reason in method.about.expects.items()
        if expected not in names
    ]
