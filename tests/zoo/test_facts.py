"""What classes declare of their limits and of each other: true, and said once."""

import itertools
from collections import defaultdict

from rlstab import S2TMask, TopEntropyMask, compose
from rlstab.core.metadata import MASK
from rlstab.core.objective import TokenObjective
from rlstab.errors import Conflict
from tests.examples import EXAMPLES

ABOUT = {name: type(methods[0]).about for name, methods in EXAMPLES.items()}
DECLARED = [(name, interaction) for name, about in ABOUT.items() for interaction in about.interacts]


def composes(*methods: TokenObjective) -> bool:
    try:
        return bool(compose(*methods).members)
    except Conflict:
        return False


def test_an_interaction_names_methods_that_exist_and_holds_at_some_settings() -> None:
    for name, interaction in DECLARED:
        assert set(interaction.names) <= EXAMPLES.keys() - {name} | {MASK}
        sentence = interaction.says(name, *interaction.names)
        assert all(f"`{key}`" in sentence or key == MASK in sentence for key in interaction.names), sentence
        for other in {"s2t" if key == MASK else key for key in interaction.names}:
            pairs = [*itertools.product(EXAMPLES[name], EXAMPLES[other])]
            special = (S2TMask(population="all"), TopEntropyMask(share=0.1))
            assert any(interaction.holds(*pair) for pair in [*pairs, special]), (name, other)
            assert interaction.kind != "good" or any(composes(*pair) for pair in pairs)


def test_a_pair_is_declared_on_one_side_and_not_as_good_and_bad() -> None:
    sides, kinds = defaultdict(set), defaultdict(set)
    for name, interaction in DECLARED:
        for other in interaction.names:
            sides[frozenset({name, other})].add(name)
            kinds[frozenset({name, other})].add(interaction.kind)
    assert [pair for pair, names in sides.items() if len(names) > 1] == []
    assert [pair for pair, several in kinds.items() if "good" in several and several & {"conflicts", "redundant"}] == []


def test_a_limit_is_reached_at_its_settings_alone() -> None:
    for name, about in ABOUT.items():
        assert about.no_op_at
        for limit in about.no_op_at:
            assert limit.reached(limit.at(EXAMPLES[name][0])) == (limit.settings is not None)
