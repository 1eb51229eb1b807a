"""Every pair of methods composes under the split law, or is refused with a reason: no pair is forgotten."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from rlstab import available, compose
from rlstab.core.compose import Composition
from rlstab.core.objective import TokenObjective
from rlstab.core.terms import SLOTS
from rlstab.errors import Conflict
from rlstab.testing.examples import EXAMPLES
from rlstab.testing.law import Case
from rlstab.testing.laws_of_agreement import split
from rlstab.testing.steps import make_step
from tests.zoo.watch import shipped

NAMES = [cls.name for cls in shipped()]
PAIRS = list(itertools.combinations_with_replacement(NAMES, 2))
#: Two optimizer steps with ragged and empty rows, ties and both signs, in parts over ranks as the law cuts them.
STEPS = [make_step(kind, (5, 0, 7, 1, 4, 6), 2, seed, ()) for seed, kind in enumerate(("mixed", "tied"))]


def composed(one: TokenObjective, other: TokenObjective) -> Composition | str:
    """The composition of two methods, or why there is none."""
    try:
        return compose(one, other)
    except Conflict as refusal:
        return str(refusal)


def often(place: int, pair: tuple[str, str]) -> Any:
    """A pair as a parameter: every third one by default, the others among the slow tests."""
    return pytest.param(*pair, marks=[pytest.mark.slow] if place % 3 else [], id=" ".join(pair))


@pytest.mark.parametrize(("one", "other"), [often(place, pair) for place, pair in enumerate(PAIRS)])
def test_a_pair_is_composed_under_the_split_law_or_refused_with_a_reason(one: str, other: str) -> None:
    found = composed(EXAMPLES[one][0], EXAMPLES[other][0])
    if isinstance(found, str):
        assert f"'{one}" in found  # numbered where it is there twice
        assert f"'{other}" in found
        assert found.endswith(("Remove one of them.", "combine freely.)", "Give both the same min_p."))
    else:
        split(found, Case(*STEPS, seed=len(one) + 31 * len(other)))


def test_all_pairs_are_there_and_most_of_them_compose() -> None:
    assert available() == NAMES
    assert len(PAIRS) == len(NAMES) * (len(NAMES) + 1) // 2
    refused = [pair for pair in PAIRS if isinstance(composed(*(EXAMPLES[name][0] for name in pair)), str)]
    assert len(refused) < len(PAIRS) / 4, Counter(itertools.chain(*refused))


def test_what_owns_one_slot_is_refused_whatever_the_settings() -> None:
    """And nothing else is refused without a class that says why."""
    for one, other in itertools.combinations(NAMES, 2):
        for pair in itertools.product(EXAMPLES[one], EXAMPLES[other]):
            slots = [method.writes & set(SLOTS) for method in pair]
            region = [slot & {"bounds", "surrogate"} for slot in slots]
            both = bool(slots[0] & slots[1]) or all(region)
            told = any(
                key == right.name or key in right.writes
                for left, right in itertools.permutations(pair)
                for key in left.excludes
            )
            differ = any(
                left.signal_options.get(key, value) != value
                for left, right in [pair]
                for key, value in right.signal_options.items()
            )
            assert isinstance(composed(*pair), str) == (both or told or differ), pair
