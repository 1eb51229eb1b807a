"""The methods of an objective by name, as ``rlstab explain`` speaks of them."""

from __future__ import annotations

from collections import Counter

from rlstab.core.compose import Leaf, walk
from rlstab.core.objective import TokenObjective
from rlstab.zoo.token_mean import TokenMean


def parts(objective: TokenObjective) -> dict[str, Leaf]:
    """Methods by name, numbered where one occurs several times.

    A composition without an owner of the aggregation is a token mean, so that is one of its parts.
    """
    leaves = list(walk(objective))
    if "aggregate" not in objective.writes:
        leaves.append(Leaf(TokenMean()))
    several, seen = Counter(one.name for one in leaves), Counter[str]()
    found = {}
    for one in leaves:
        seen[one.name] += 1
        found[f"{one.name}_{seen[one.name]}" if several[one.name] > 1 else one.name] = one
    return found
