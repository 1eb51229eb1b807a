"""What a method of the loss and a stage outside of it share: settings, summaries of parts, a state that follows."""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar, dataclass_transform

import torch

from rlstab.core.comm import Comm, LocalComm, Rounds, carried_out
from rlstab.core.metadata import About, summary
from rlstab.core.method_checks import (
    DECLARED,
    SETS,
    check_class,
    check_mapping,
    check_same,
    checked_stat,
    checked_state,
)
from rlstab.core.method_settings import Spelled, check_settings, settings_of
from rlstab.core.stats import NOTHING, Settled, Stat, settling
from rlstab.errors import MethodError

#: A plain dict of numbers, bools and tensors (and, in a composition, of such dicts), saved in the checkpoint.
State: TypeAlias = Mapping[str, Any]

#: What is measured in parts: tokens of an optimizer step, or responses of a rollout.
Batch = TypeVar("Batch")


@dataclass_transform(frozen_default=True)
class Method(Spelled, ABC, Generic[Batch]):
    """A subclass is a frozen dataclass whose annotated fields are its settings. It runs without gradient.

    Attributes:
        name: the name in YAML and in metrics.
        about: what it says about itself.
        needs: signals of the evidence that it reads.
        ascending: names of settings of which none may be less than the one before.
    """

    name: ClassVar[str]
    about: ClassVar[About] = About()
    #: The abstract method that every subclass has to define.
    _acts_by: ClassVar[str] = ""

    def __init_subclass__(cls, *, combinator: bool = False, **kwargs: Any) -> None:
        """Make a frozen dataclass of the class, and check what it declares.

        Raises:
            MethodError: see :func:`rlstab.core.method_checks.check_class`.
        """
        super().__init_subclass__(**kwargs)
        hints = inspect.get_annotations(cls)
        cls.__annotations__ = {name: ClassVar[Any] if name in DECLARED else hint for name, hint in hints.items()}
        for name in SETS:
            if isinstance(cls.__dict__.get(name), set):
                setattr(cls, name, frozenset(cls.__dict__[name]))
        if not combinator:
            _check_settings_first(cls)
        text = cls.__doc__
        dataclass(frozen=True)(cls)
        cls.__doc__ = text  # without one, it would be the signature
        # of this class, so that an explicit @dataclass can define them again
        del cls.__setattr__, cls.__delattr__
        acts = getattr(cls, cls._acts_by, None)
        if not combinator and acts is not None and not getattr(acts, "__isabstractmethod__", False):
            check_class(cls)

    def __post_init__(self) -> None:
        check_settings(self, self.name, self.ascending)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"'{self.name}': {name} cannot be set. Make another one: dataclasses.replace.")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"'{self.name}': {name} cannot be deleted.")

    @property
    def _label(self) -> str:
        """What it is called in metrics and in the state of a composition."""
        return self.name

    def _summary(self) -> str:
        """The first line of the docstring, with all settings."""
        chosen = ", ".join(f"{setting.name} = {getattr(self, setting.name)!r}" for setting in settings_of(type(self)))
        return f"{summary(type(self))} ({chosen})" if chosen else summary(type(self))

    if TYPE_CHECKING:
        # Class attributes in most methods, properties where they depend on a setting. Any, because no other type lets a
        # type checker accept both; here, because in a subclass they would be settings to it.
        needs: Any
        live_needs: Any
        writes: Any
        excludes: Any
        signal_options: Any
        reads_drift: Any
        ascending: Any
    else:
        needs, ascending = frozenset(), ()

    def init_state(self) -> State:
        """The first state; its keys are those of every later one."""
        return {}

    def measure(self, part: Batch) -> Stat:
        """Mergeable summaries of one part; those of an empty part have the same names."""
        return NOTHING

    def measure_again(self, part: Batch, stat: Settled) -> Stat:
        """Summaries of what can be computed only once those of ``measure`` are settled: a covariance after its means.

        Under other names than those of ``measure``; whatever sees the statistics sees both.
        """
        return NOTHING

    def advance(self, state: State, stat: Settled) -> State:
        """The next state; pure, called once for each whole whose parts were measured."""
        return state

    @abstractmethod
    def _empty_part(self) -> Batch:
        """An empty part."""

    def _settling(self, parts: Sequence[Batch], state: State, local: bool) -> Rounds[tuple[Settled, State]]:
        """See :func:`measure_all`; combinators override it, so that what they contain shares its rounds."""
        stat = yield from self._measured("measure", parts, local)
        second_stat = yield from self._measured("measure_again", parts, local, stat)
        stat = Settled({**stat, **second_stat})
        check_mapping(self.name, "init_state", state)
        return stat, checked_state(self.name, state, self.advance(state, stat))

    def _measured(self, method: str, parts: Sequence[Batch], local: bool, *first: Settled) -> Rounds[Settled]:
        """What ``measure`` or ``measure_again`` found over the whole; nothing if the class does not define it.

        An empty part is measured on every rank, because some rank may have no other.
        """
        if getattr(type(self), method) is getattr(Method, method):
            return Settled()
        measure = getattr(self, method)
        stats = [checked_stat(self.name, method, measure(part, *first)) for part in parts]
        try:
            without = measure(self._empty_part(), *first)
        except Exception as error:
            raise MethodError(
                f"'{self.name}': {method} failed on a batch without tokens, which a rank may have: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Return empty summaries there."
            ) from error
        without = checked_stat(self.name, method, without)
        check_same(self.name, method, stats, without)
        for name in sorted(without.keys() & {name for stat in first for name in stat}):
            raise MethodError(
                f"'{self.name}': measure and measure_again both returned '{name}', of which one is lost. Rename it."
            )
        return (yield from settling(stats or [without], local))


def measure_all(method: Method[Batch], parts: Sequence[Batch], state: State, comm: Comm) -> tuple[Settled, State]:
    """Statistics of the whole, over all parts and ranks, and the state after it.

    The empty part gives a rank without parts the names, so that all ranks join the same collectives.
    """
    with torch.no_grad():
        return carried_out(method._settling(parts, state, isinstance(comm, LocalComm)), comm)


def _check_settings_first(cls: type[Method[Any]]) -> None:
    """Check settings even if a ``__post_init__`` does not call that of its base, and before it reads them."""
    post_init = cls.__dict__.get("__post_init__")
    if post_init is not None:

        @functools.wraps(post_init)
        def checked(self: Method[Any]) -> None:
            check_settings(self, self.name, self.ascending)
            post_init(self)

        cls.__post_init__ = checked  # type: ignore[method-assign]  # the class is still being made
