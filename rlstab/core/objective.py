"""The one interface: a method contributes terms, made from evidence, to one loss."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Any, ClassVar, TypeAlias

import torch

from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm
from rlstab.core.settings import check_settings, settings_of
from rlstab.core.stats import NOTHING, Settled, Stat, settle
from rlstab.core.terms import Terms
from rlstab.errors import MissingSignal

#: A plain dict of numbers, bools and tensors (and, in a composition, of such dicts), saved in the checkpoint.
State: TypeAlias = Mapping[str, Any]


class TokenObjective(ABC):
    """A method: what it asks for, given the evidence, the statistics of the step and its state.

    A method is a final frozen dataclass; its fields are its settings. Only :meth:`terms` is required. Everything runs
    without gradient: what a method returns are decisions, and gradients live only in the functions inside
    :class:`~rlstab.core.terms.Terms`.

    Attributes:
        name: the name in YAML and in metrics.
        exceptions: laws of :mod:`rlstab.testing` that it does not obey, each with the reason.
    """

    name: ClassVar[str]
    exceptions: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        check_settings(self, self.name)

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
    def signal_options(self) -> Mapping[str, float]:
        """Numbers that define a signal it reads, such as ``min_p`` of ``log_kept_mass``."""
        return {}

    @property
    def trust_region(self) -> bool:
        """False where it writes a surrogate that ignores ``bounds`` and ``exempt``."""
        return True

    def in_words(self) -> Mapping[str, str]:
        """What it does to a token: sentences for each field of Terms that it may fill, with the settings filled in.

        A setting that the sentences leave out has no effect beside the others. Without an override it is the first
        line of the docstring, with all settings, under one of the fields.
        """
        summary = inspect.cleandoc(type(self).__doc__ or "").partition("\n")[0].replace("``", "")
        chosen = ", ".join(f"{one.name} = {getattr(self, one.name)!r}" for one in settings_of(type(self)))
        text = f"{summary} ({chosen})" if chosen else summary
        return dict.fromkeys(sorted(self.writes)[:1], text)

    def init_state(self) -> State:
        """State before the first optimizer step."""
        return {}

    def measure(self, batch: TokenBatch) -> Stat:
        """Mergeable summaries of one part of the step; an empty batch gives empty summaries of the same names."""
        return NOTHING

    def advance(self, state: State, stat: Settled) -> State:
        """The state with which this step is made, from the last one; pure, called once per optimizer step."""
        return state

    @abstractmethod
    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        """What this method asks for on one part of the step."""

    def settle(self, parts: Sequence[TokenBatch], state: State, comm: Comm) -> tuple[Settled, State]:
        """Statistics of the whole step and the state with which it is made.

        Methods leave this alone; combinators override it, because what they contain may need several rounds of
        measuring. The empty batch makes a rank without parts know the names, so that all join the same collectives.
        """
        with torch.no_grad():
            stat = settle((self.measure(part) for part in parts or (TokenBatch.empty(self.needs),)), comm)
            return stat, self.advance(state, stat)


def require_signals(
    objective: TokenObjective,
    *,
    provides: Set[str],
    live: Set[str],
    host: str,
    otherwise: str = "use a host that provides it",
) -> None:
    """Check, before anything runs, that a host provides what an objective reads.

    Args:
        objective: usually a composition.
        provides: signals of the evidence that the host can give beyond the basic ones.
        live: outputs of the live policy that it can differentiate beyond the log-probs.
        host: its name in the error.
        otherwise: what to do about a missing signal, other than to remove the method.

    Raises:
        MissingSignal: names the method that reads it.
    """
    members: Mapping[str, TokenObjective] = getattr(objective, "keyed", {objective.name: objective})
    for key, method in members.items():
        for kind, wanted, given in (("", method.needs, provides), ("the live ", method.live_needs, live)):
            missing = sorted(wanted - given)
            if missing:
                raise MissingSignal(
                    f"'{key}' reads {kind}'{missing[0]}', which {host} does not provide. It provides: "
                    f"{', '.join(sorted(given))}. Remove '{key}', or {otherwise}."
                )
