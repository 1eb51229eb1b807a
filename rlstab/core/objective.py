"""The one interface: a method contributes terms, made from evidence, to one loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

from rlstab.core.batch import TokenBatch
from rlstab.core.checked_terms import checked_terms
from rlstab.core.contract import BASICS
from rlstab.core.docstring import summary
from rlstab.core.facts import Interaction, Limit
from rlstab.core.method import Method, State
from rlstab.core.settings import settings_of
from rlstab.core.stats import Settled
from rlstab.core.terms import Terms
from rlstab.errors import MissingSignal

__all__ = ["Member", "State", "TokenObjective", "ask", "require_signals"]


class TokenObjective(Method[TokenBatch]):
    """A method: what it asks for, given the evidence, the statistics of the optimizer step and its state.

    A method is a final frozen dataclass; its fields are its settings. Only :meth:`terms` is required. Everything runs
    without gradient: what a method returns are decisions, and gradients live only in the functions inside
    :class:`~rlstab.core.terms.Terms`.

    Its state advances before its terms are made: the state of an optimizer step is the one with which it is made.

    Attributes:
        excludes: methods by name, or fields of Terms that another method fills, with which it cannot be composed, each
            with the reason; a property where it depends on a setting.
        requires: methods by name, or fields of Terms that some method has to fill, without which it is not itself,
            each with the reason. Checked when a loss is made, for a composition may grow until then.
        limits: settings at which it is the identity.
        interacts: what it and other methods do to each other, where the other one does not say so already.
    """

    requires: ClassVar[Mapping[str, str]] = {}
    limits: ClassVar[tuple[Limit, ...]] = ()
    interacts: ClassVar[tuple[Interaction, ...]] = ()

    acts_by = "terms"

    @property
    def live_needs(self) -> frozenset[str]:
        """Outputs of the live policy that its penalties differentiate, beyond the log-probs."""
        return frozenset()

    @property
    def writes(self) -> frozenset[str]:
        """Fields of Terms that it may fill."""
        return frozenset()

    @property
    def excludes(self) -> Mapping[str, str]:
        """Methods, or fields of Terms, with which it cannot be composed, each with the reason."""
        return {}

    @property
    def signal_options(self) -> Mapping[str, float]:
        """Numbers that define a signal it reads, such as ``min_p`` of ``log_kept_mass``."""
        return {}

    @property
    def reads_policies(self) -> frozenset[str]:
        """Which of ``logprobs`` and ``old_logprobs`` it reads from the evidence; without an override, both.

        The ratio is not meant: it is the loss's own, and where ``live_ratio`` is True it reads neither. A host that
        gives no method its log-probs needs no forward for them.
        """
        return frozenset(BASICS)

    @property
    def reads_drift(self) -> frozenset[str]:
        """Which policies it compares (:data:`rlstab.core.contract.DRIFT`); it is idle where they are one.

        Unset settings of a run follow from it. Without an override it is the ratio, for what writes a trust region.
        """
        return frozenset({"live"} if self.writes & {"ratio", "bounds", "pull", "gates"} else ())

    def acting(self) -> Iterator[TokenObjective]:
        """The methods that act on the loss: itself, or what a combinator contains."""
        yield self

    def in_words(self) -> Mapping[str, str]:
        """What it does to a token: sentences for each field of Terms that it may fill, with the settings filled in.

        A setting that the sentences leave out has no effect beside the others. Without an override it is the first
        line of the docstring, with all settings, under one of the fields, or under ``report`` where it fills none.
        """
        chosen = ", ".join(f"{one.name} = {getattr(self, one.name)!r}" for one in settings_of(type(self)))
        text = f"{summary(type(self))} ({chosen})" if chosen else summary(type(self))
        return dict.fromkeys(sorted(self.writes)[:1] or ["report"], text)

    def empty_part(self) -> TokenBatch:
        """A batch without tokens."""
        return TokenBatch.empty(self.needs)

    @abstractmethod
    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        """What this method asks for on one part of the step."""

    def asked(self, batch: TokenBatch, stat: Settled, state: State, key: str = "") -> dict[str, Member]:
        """What it asks for on one part, before it is merged with others: by the prefix of its metrics.

        Combinators override it to give what each of their members asks for.
        """
        return {key or self.label: Member(self.name, ask(self, batch, stat, state))}


@dataclass(frozen=True, eq=False)
class Member:
    """What one method asks for on one part of an optimizer step, beside the others.

    Attributes:
        name: of the method.
        terms: over all tokens of the part, also where the method saw only those that another one kept.
    """

    name: str
    terms: Terms


def ask(method: TokenObjective, batch: TokenBatch, stat: Settled, state: State) -> Terms:
    """The terms of a method on one part, checked.

    Raises:
        MethodError: see :func:`rlstab.core.checked_terms.checked_terms`.
    """
    return checked_terms(method.name, method.terms(batch, stat, state), batch, method.writes)


def require_signals(
    objective: TokenObjective,
    *,
    provides: Set[str],
    live: Set[str],
    host: str,
    otherwise: str | Mapping[str, str] = "use a host that provides it",
) -> None:
    """Check, before anything runs, that a host provides what an objective reads.

    Args:
        objective: usually a composition.
        provides: signals of the evidence that the host can give beyond the basic ones.
        live: outputs of the live policy that it can differentiate beyond the log-probs.
        host: its name in the error.
        otherwise: what to do about a missing signal, other than to remove the method; one text, or one by signal.

    Raises:
        MissingSignal: names the method that reads it.
    """
    members: Mapping[str, TokenObjective] = getattr(objective, "keyed", {objective.name: objective})
    for key, method in members.items():
        for kind, wanted, given in (("", method.needs, provides), ("the live ", method.live_needs, live)):
            missing = sorted(wanted - given)
            if missing:
                cure = otherwise if isinstance(otherwise, str) else otherwise[missing[0]]
                raise MissingSignal(
                    f"'{key}' reads {kind}'{missing[0]}', which {host} does not provide. It provides: "
                    f"{', '.join(sorted(given))}. Remove '{key}', or {cure}."
                )
