"""The methods that an objective is made of, each with those within which it acts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlstab.core.compose import Composition, Within
from rlstab.core.objective import TokenObjective
from rlstab.core.observe import Observe


@dataclass(frozen=True, eq=False)
class Leaf:
    """A method in its place.

    Attributes:
        method: neither a composition nor a `within`; an `observe` represents what it observes.
        around: the methods whose kept tokens are all that it sees, from the outside.
    """

    method: TokenObjective
    around: tuple[Leaf, ...] = ()

    @property
    def name(self) -> str:
        """What the method is called: its label, which is its name unless it is only observed."""
        return self.method.label

    def nested(self, other: Leaf) -> bool:
        """One of the two acts within the other."""
        return other in self.around or self in other.around


def walk(objective: TokenObjective, around: tuple[Leaf, ...] = (), *, observed: bool = False) -> Iterator[Leaf]:
    """The methods of an objective in its order, those inside `within` too.

    With ``observed`` also the methods that are only observed; without it each of them is a leaf of its own.
    """
    if isinstance(objective, Composition):
        for one in objective.members:
            yield from walk(one, around, observed=observed)
    elif isinstance(objective, Within):
        outer = tuple(walk(objective.outer, around, observed=observed))
        yield from outer
        yield from walk(objective.inner, (*around, *outer), observed=observed)
    elif isinstance(objective, Observe) and observed:
        yield from walk(objective.method, around, observed=True)
    else:
        yield Leaf(objective, around)
