"""What a method of the loss and a stage outside of it share: settings, summaries of parts, a state that follows."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch

from rlstab.core.comm import Comm
from rlstab.core.contract import (
    check_class,
    check_made,
    check_mapping,
    check_names,
    check_same,
    checked_stat,
    checked_state,
)
from rlstab.core.stats import NOTHING, Settled, Stat, settle
from rlstab.errors import MethodError

#: A plain dict of numbers, bools and tensors (and, in a composition, of such dicts), saved in the checkpoint.
State: TypeAlias = Mapping[str, Any]

#: What is measured in parts: tokens of an optimizer step, or responses of a rollout.
Part = TypeVar("Part")


class Method(ABC, Generic[Part]):
    """A final frozen dataclass whose fields are its settings. All of it runs without gradient.

    Attributes:
        name: the name in YAML and in metrics.
        exceptions: laws of :mod:`rlstab.testing` that it does not obey, each with the reason.
        addresses: the sources of instability that it is meant against, of :data:`rlstab.core.facts.SOURCES`.
        expects: what it was published with, by name, each with the reason. It works without, and a warning says that it
            is then not what its source describes.
        acts_by: the abstract method that every kind of it has to define.
    """

    name: ClassVar[str]
    exceptions: ClassVar[Mapping[str, str]] = {}
    addresses: ClassVar[frozenset[str]] = frozenset()
    expects: ClassVar[Mapping[str, str]] = {}
    acts_by: ClassVar[str] = ""

    def __init_subclass__(cls, *, combinator: bool = False, **kwargs: Any) -> None:
        """Check the class; settings are checked also where a ``__post_init__`` does not call this one.

        Raises:
            MethodError: see :func:`rlstab.core.contract.check_class`.
        """
        super().__init_subclass__(**kwargs)
        if combinator:
            return
        acts = getattr(cls, cls.acts_by, None)
        if acts is not None and not getattr(acts, "__isabstractmethod__", False):
            check_class(cls)
        own = cls.__dict__.get("__post_init__")
        if own is not None:

            @functools.wraps(own)
            def checked(self: Method[Part]) -> None:
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

    def init_state(self) -> State:
        """The first state; its keys are those of every later one."""
        return {}

    def measure(self, part: Part) -> Stat:
        """Mergeable summaries of one part; those of an empty part have the same names."""
        return NOTHING

    def measure_again(self, part: Part, stat: Settled) -> Stat:
        """Summaries of what can be computed only once those of ``measure`` are settled: a covariance after its means.

        Under other names than those of ``measure``; whatever sees the statistics sees both.
        """
        return NOTHING

    def advance(self, state: State, stat: Settled) -> State:
        """The next state; pure, called once for each whole whose parts were measured."""
        return state

    @abstractmethod
    def empty_part(self) -> Part:
        """A part in which there is nothing."""

    def settle(self, parts: Sequence[Part], state: State, comm: Comm) -> tuple[Settled, State]:
        """Statistics of the whole, over all parts and ranks, and the state after it.

        Methods leave this alone; combinators override it, because what they contain may need several rounds of
        measuring. The empty part makes a rank without parts know the names, so that all join the same collectives.
        """
        with torch.no_grad():
            stat = self._measured("measure", parts, comm)
            stat = Settled({**stat, **self._measured("measure_again", parts, comm, stat)})
            check_mapping(self.name, "init_state", state)
            return stat, checked_state(self.name, state, self.advance(state, stat))

    def _measured(self, method: str, parts: Sequence[Part], comm: Comm, *first: Settled) -> Settled:
        """What ``measure`` or ``measure_again`` found over the whole; nothing where the class does not have it.

        An empty part is measured on every rank, for some rank may have no other.
        """
        if getattr(type(self), method) is getattr(Method, method):
            return Settled()
        measure = getattr(self, method)
        stats = [checked_stat(self.name, method, measure(part, *first)) for part in parts]
        try:
            without = measure(self.empty_part(), *first)
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
