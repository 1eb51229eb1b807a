"""The methods that an objective is made of, each with those within which it acts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlstab.core.compose import Composition, Within
from rlstab.core.objective import TokenObjective


@dataclass(frozen=True, eq=False)
class Leaf:
    """A method in its place.

    Attributes:
        method: neither a composition nor a `within`.
        around: the methods whose kept tokens are all that it sees, from the outside.
    """

    method: TokenObjective
    around: tuple[Leaf, ...] = ()

    @property
    def name(self) -> str:
        """The name of the method."""
        return self.method.name

    def nested(self, other: Leaf) -> bool:
        """One of the two acts within the other."""
        return other in self.around or self in other.around


def walk(objective: TokenObjective, around: tuple[Leaf, ...] = ()) -> Iterator[Leaf]:
    """The methods of an objective in its order, those inside `within` too."""
    if isinstance(objective, Composition):
        for one in objective.members:
            yield from walk(one, around)
    elif isinstance(objective, Within):
        outer = tuple(walk(objective.outer, around))
        yield from outer
        yield from walk(objective.inner, (*around, *outer))
    else:
        yield Leaf(objective, around)
