"""The one interface: a method contributes terms, made from evidence, to one loss."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch

from rlstab.core.batch import TokenBatch
from rlstab.core.checked_terms import checked_terms
from rlstab.core.comm import Comm
from rlstab.core.contract import (
    BASICS,
    check_class,
    check_made,
    check_mapping,
    check_names,
    check_same,
    checked_stat,
    checked_state,
)
from rlstab.core.docstring import summary
from rlstab.core.facts import Interaction, Limit
from rlstab.core.settings import settings_of
from rlstab.core.stats import NOTHING, Settled, Stat, settle
from rlstab.core.terms import Terms
from rlstab.errors import MethodError, MissingSignal

#: A plain dict of numbers, bools and tensors (and, in a composition, of such dicts), saved in the checkpoint.
State: TypeAlias = Mapping[str, Any]


class TokenObjective(ABC):
    """A method: what it asks for, given the evidence, the statistics of the optimizer step and its state.

    A method is a final frozen dataclass; its fields are its settings. Only :meth:`terms` is required. Everything runs
    without gradient: what a method returns are decisions, and gradients live only in the functions inside
    :class:`~rlstab.core.terms.Terms`.

    Attributes:
        name: the name in YAML and in metrics.
        exceptions: laws of :mod:`rlstab.testing` that it does not obey, each with the reason.
        addresses: the sources of instability that it is meant against, of :data:`rlstab.core.facts.SOURCES`.
        excludes: methods by name, or fields of Terms that another method fills, with which it cannot be composed, each
            with the reason; a property where it depends on a setting.
        requires: methods by name, or fields of Terms that some method has to fill, without which it is not itself,
            each with the reason. Checked when a loss is made, for a composition may grow until then.
        expects: likewise, what it was published with. It composes without, and a warning says that it is then not what
            its source describes.
        limits: settings at which it is the identity.
        interacts: what it and other methods do to each other, where the other one does not say so already.
    """

    name: ClassVar[str]
    exceptions: ClassVar[Mapping[str, str]] = {}
    addresses: ClassVar[frozenset[str]] = frozenset()
    requires: ClassVar[Mapping[str, str]] = {}
    expects: ClassVar[Mapping[str, str]] = {}
    limits: ClassVar[tuple[Limit, ...]] = ()
    interacts: ClassVar[tuple[Interaction, ...]] = ()

    def __init_subclass__(cls, *, combinator: bool = False, **kwargs: Any) -> None:
        """Check the class; settings are checked also where a ``__post_init__`` does not call this one.

        Raises:
            MethodError: see :func:`rlstab.core.contract.check_class`.
        """
        super().__init_subclass__(**kwargs)
        if combinator:
            return
        if not getattr(cls.terms, "__isabstractmethod__", False):
            check_class(cls)
        own = cls.__dict__.get("__post_init__")
        if own is not None:

            @functools.wraps(own)
            def checked(self: TokenObjective) -> None:
                check_made(self, self.name)
                own(self)

            cls.__post_init__ = checked  # type: ignore[method-assign]  # the class is still being made

    def __init__(self, *settings: object, **named: object) -> None:
        raise MethodError(
            f"{type(self).__qualname__} is no dataclass, so it has no settings. Write @dataclass(frozen=True) above "
            f"the "
            f"class."
        )

    def __post_init__(self) -> None:
        check_made(self, self.name)

    @property
    def label(self) -> str:
        """What it is called in metrics and in the state of a composition."""
        return self.name

    # A class attribute in most methods; a property where it depends on a setting.

    @property
    def needs(self) -> frozenset[str]:
        """Signals of the evidence that it reads beyond the basic ones."""
        return frozenset()

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

    def init_state(self) -> State:
        """State before the first optimizer step; its keys are those of every later one."""
        return {}

    def measure(self, batch: TokenBatch) -> Stat:
        """Mergeable summaries of one part of the optimizer step; those of an empty batch have the same names."""
        return NOTHING

    def measure_again(self, batch: TokenBatch, stat: Settled) -> Stat:
        """Summaries of what can be computed only once those of ``measure`` are settled: a covariance after its means.

        Under other names than those of ``measure``; ``advance`` and ``terms`` see both.
        """
        return NOTHING

    def advance(self, state: State, stat: Settled) -> State:
        """The state with which this step is made, from the last one; pure, called once per optimizer step."""
        return state

    @abstractmethod
    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        """What this method asks for on one part of the step."""

    def settle(self, parts: Sequence[TokenBatch], state: State, comm: Comm) -> tuple[Settled, State]:
        """Statistics of the whole optimizer step and the state with which it is made.

        Methods leave this alone; combinators override it, because what they contain may need several rounds of
        measuring. The empty batch makes a rank without parts know the names, so that all join the same collectives.
        """
        with torch.no_grad():
            stat = self._measured("measure", parts, comm)
            stat = Settled({**stat, **self._measured("measure_again", parts, comm, stat)})
            check_mapping(self.name, "init_state", state)
            return stat, checked_state(self.name, state, self.advance(state, stat))

    def _measured(self, method: str, parts: Sequence[TokenBatch], comm: Comm, *first: Settled) -> Settled:
        """What ``measure`` or ``measure_again`` found over the whole step; nothing where the class does not have it.

        A batch without tokens is measured on every rank, for some rank may have no other.
        """
        if getattr(type(self), method) is getattr(TokenObjective, method):
            return Settled()
        measure = getattr(self, method)
        stats = [checked_stat(self.name, method, measure(part, *first)) for part in parts]
        try:
            without = measure(TokenBatch.empty(self.needs), *first)
        except Exception as error:
            raise MethodError(
                f"'{self.name}': {method} failed on a batch without tokens, which a rank may have: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. "
                f"Return empty summaries, such as Mean.of of no values."
            ) from error
        without = checked_stat(self.name, method, without)
        check_same(self.name, method, stats, without)
        for one in first:
            check_names(self.name, one, without)
        return settle(stats or [without], comm)

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
