"""What a class says about itself for its reader: read by its card, ``rlstab explain`` and the laws alike."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

#: ``conflicts``: one undoes what the other does. ``redundant``: both do one thing, or one leaves the other little to
#: do. ``note``: they do not hinder each other, and what comes of it may surprise. ``good``: known to go well together.
Kind = Literal["conflicts", "redundant", "note", "good"]

#: What makes training unstable, by the name under which a method says that it is meant against it.
SOURCES: Mapping[str, str] = {
    "token": "single tokens whose gradient is out of proportion: rare, spurious or already certain",
    "trust region": "several optimizer steps on one rollout: the policy moves away from the data",
    "sample": "responses that should count less than others: stale, truncated or of the wrong sign",
    "exploration": "entropy that collapses, and with it exploration",
    "length": "responses of different lengths that share one divisor",
    "reference": "a reward that does not measure everything: what it does not measure drifts",
    "off-policy": "a sampler that differs from the policy: different kernels or precision, older weights",
}

#: Stands for every method that drops tokens.
MASK = "any mask"

Method = TypeVar("Method")


@dataclass(frozen=True)
class NoOpAt:
    """Where a method is the identity: it changes no loss and no gradient.

    Attributes:
        settings: a method with these values is the identity, whatever its other settings are, and they fit any other
            settings. Empty: it always is. None: no setting makes it so, but some optimizer steps do.
        why: the reason, one sentence without its full stop.
    """

    settings: Mapping[str, Any] | None
    why: str

    def at(self, method: Method) -> Method:
        """The method with these settings."""
        return dataclasses.replace(method, **(self.settings or {}))  # type: ignore[type-var]  # a dataclass

    def reached(self, method: object) -> bool:
        """Whether the settings of a method, and not only an optimizer step, make it the identity."""
        return self.settings is not None and all(getattr(method, name) == at for name, at in self.settings.items())


@dataclass(frozen=True)
class Interaction:
    """What a method and another one do to each other; only one of the two declares it.

    Attributes:
        kind: see :data:`Kind`.
        others: name of the other method, or names; or :data:`MASK`.
        why: one or two sentences, the first without a capital. ``{own}`` and ``{other}`` become the names; with several
            others that may be "a, b and c".
        where: holds only for methods with these settings. ``why`` says which.
        nested: also holds where one of them acts within the other.
    """

    kind: Kind
    others: str | tuple[str, ...]
    why: str
    where: Callable[[Any, Any], bool] = lambda own, other: True
    nested: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The others, always several."""
        return (self.others,) if isinstance(self.others, str) else self.others

    def holds(self, own: object, other: Any) -> bool:
        """Whether it holds between two methods at their settings."""
        named = other.name in self.names or (MASK in self.names and "keep" in other.writes)
        return named and self.where(own, other)

    def says(self, own: str, *others: str) -> str:
        """The sentence about these methods, names in backticks."""
        *first, last = [name if name == MASK else f"`{name}`" for name in others]
        return self.why.format(own=f"`{own}`", other=f"{', '.join(first)} and {last}" if first else last)


conflicts = partial(Interaction, "conflicts")
redundant = partial(Interaction, "redundant")
note = partial(Interaction, "note")
good = partial(Interaction, "good")

#: Of a method that acts by how far the ratio is from 1.
ON_POLICY = NoOpAt(None, "Where every ratio is exactly 1, as with one optimizer step per rollout.")
#: Of one that does so only where it is anchored at the old policy.
ON_POLICY_OLD = NoOpAt(None, f"With anchor 'old', w{ON_POLICY.why[1:]}")

#: Of a method whose penalty has no mask of its own.
EVERY_TOKEN = note(
    MASK,
    "{own} acts on every token, also on those that {other} drops: penalties ignore masks.",
    nested=False,
)

#: Of a method whose divisor does not depend on what is kept.
FIXED_LENGTH = conflicts(MASK, "{own} divides by a fixed length, so the tokens that {other} drops still count in it.")


@dataclass(frozen=True)
class About:
    """What a method, or a stage, says about itself; nothing of it changes the loss.

    Attributes:
        addresses: the sources of instability that it is meant against, of :data:`SOURCES`.
        no_op_at: where it is the identity. The laws check the settings that are named.
        interacts: what it and other methods do to each other, where the other one does not say so already.
        expects: what it was published with, by name (or a field of Terms that another method fills), each with the
            reason. It works without, and a warning says that it is then not what its source describes.
        exceptions: laws of :mod:`rlstab.testing` that it does not obey, each with the reason.
    """

    addresses: Set[str] = frozenset()
    no_op_at: tuple[NoOpAt, ...] = ()
    interacts: tuple[Interaction, ...] = ()
    expects: Mapping[str, str] = field(default_factory=dict)
    exceptions: Mapping[str, str] = field(default_factory=dict)


def docstring(cls: type) -> str:
    """The docstring of a class itself, dedented; empty where it has none, as under ``python -OO``."""
    return inspect.cleandoc(cls.__dict__.get("__doc__") or "")


def summary(cls: type) -> str:
    """The first line of the docstring of a class, without its markup."""
    return docstring(cls).partition("\n")[0].replace("``", "")
