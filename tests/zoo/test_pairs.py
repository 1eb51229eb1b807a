"""Every pair of methods composes under the split law, or is refused with a reason: no pair is forgotten."""

import itertools

import pytest

from rlstab import available, compose
from rlstab.core.compose import Composition
from rlstab.core.objective import TokenObjective
from rlstab.core.terms import SLOTS
from rlstab.errors import Conflict
from rlstab.testing.fresh_process import PickledMethod
from rlstab.testing.laws import Trial, split
from rlstab.testing.steps import make_step
from tests.examples import EXAMPLES

NAMES = available()
PAIRS = list(itertools.combinations_with_replacement(NAMES, 2))
#: Two optimizer steps with ragged and empty rows, ties and both signs, in parts over ranks as the law cuts them.
STEPS = [make_step("mixed", (5, 0, 7, 1, 4, 6), 2, seed) for seed in range(2)]
#: Parts into which the pairs are divided.
PARTS = 8


def composed(left: TokenObjective, right: TokenObjective) -> Composition | str:
    """The composition of two methods, or why there is none."""
    try:
        return compose(left, right)
    except Conflict as refusal:
        return str(refusal)


def obeys_split(pairs: list[tuple[str, str]]) -> None:
    nothing = PickledMethod(b"", {})
    for left, right in pairs:
        objective = composed(EXAMPLES[left][0], EXAMPLES[right][0])
        if not isinstance(objective, str):
            split(objective, Trial(STEPS, len(left) + 31 * len(right), nothing))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(PARTS))
def test_every_pair_obeys_the_split_law(first: int) -> None:
    obeys_split(PAIRS[first::PARTS])


def test_what_owns_one_slot_is_refused_whatever_the_settings() -> None:
    """And nothing else is refused without a class that says why."""
    for left_name, right_name in itertools.combinations(NAMES, 2):
        for pair in itertools.product(EXAMPLES[left_name][:2], EXAMPLES[right_name][-2:]):
            slots = [method.writes & set(SLOTS) for method in pair]
            region = [slot & {"bounds", "surrogate"} for slot in slots]
            both = bool(slots[0] & slots[1]) or all(region)
            told = any(
                key == right.name or key in right.writes
                for left, right in itertools.permutations(pair)
                for key in left.excludes
            )
            left, right = pair
            differ = any(left.signal_options.get(key, value) != value for key, value in right.signal_options.items())
            refusal = composed(*pair)
            assert isinstance(refusal, str) == (both or told or differ), pair
            if isinstance(refusal, str):
                assert all(f"'{method.name}" in refusal for method in pair)
