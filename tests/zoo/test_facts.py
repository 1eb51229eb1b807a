"""What classes declare of their limits and of each other: true, and said once."""

import itertools
from collections import defaultdict
from typing import get_args

import torch

from rlstab import ConstantLength, S2TMask, SequenceMean, TopEntropyMask, compose, within
from rlstab.core.batch import TokenBatch
from rlstab.core.metadata import MASK, Kind
from rlstab.core.objective import TokenObjective
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.errors import Conflict
from tests.examples import EXAMPLES
from tests.zoo.watch import evidence, examples, live, shipped

METHODS = {cls.name: cls for cls in shipped()}
DECLARED = [(name, interaction) for name, cls in METHODS.items() for interaction in cls.about.interacts]


def composes(*methods: TokenObjective) -> bool:
    try:
        return bool(compose(*methods).members)
    except Conflict:
        return False


def test_an_interaction_names_methods_that_exist_and_holds_at_some_settings() -> None:
    for name, interaction in DECLARED:
        assert set(interaction.names) <= METHODS.keys() - {name} | {MASK}
        assert interaction.kind in get_args(Kind)
        sentence = interaction.says(name, *interaction.names)
        assert all(f"`{key}`" in sentence or key == MASK in sentence for key in interaction.names), sentence
        for other in {"s2t" if key == MASK else key for key in interaction.names}:
            pairs = itertools.product([*EXAMPLES[name], *examples(METHODS[name])], EXAMPLES[other])
            special = (S2TMask(population="all"), TopEntropyMask(share=0.1))
            assert any(interaction.holds(*pair) for pair in [*pairs, special]), (name, other)
            if interaction.kind == "good":
                assert any(composes(*pair) for pair in itertools.product(EXAMPLES[name], EXAMPLES[other]))


def test_a_pair_is_declared_on_one_side_and_not_as_good_and_bad() -> None:
    sides, kinds = defaultdict(set), defaultdict(set)
    for name, interaction in DECLARED:
        for other in interaction.names:
            sides[frozenset({name, other})].add(name)
            kinds[frozenset({name, other})].add(interaction.kind)
    assert [pair for pair, names in sides.items() if len(names) > 1] == []
    assert [pair for pair, several in kinds.items() if "good" in several and several & {"conflicts", "redundant"}] == []


# -- limits ------------------------------------------------------------------------------------------------------------


def loss(*methods: TokenObjective, **changes: torch.Tensor) -> list[torch.Tensor]:
    """Loss and gradient of one step."""
    tensors = evidence() | changes
    batch, outputs = TokenBatch.from_padded(**tensors), live(tensors)
    out = compose(*methods)(batch, PolicyOutputs.from_padded(batch, **outputs)).loss
    out.backward()
    return [out.detach(), outputs["logprobs"].grad]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def test_a_limit_of_steps_is_reached_by_no_setting() -> None:
    assert all(cls.about.no_op_at for cls in METHODS.values())
    nowhere = [limit for cls in METHODS.values() for limit in cls.about.no_op_at if limit.settings is None]
    assert nowhere
    assert not any(limit.reached(method) for limit in nowhere for several in EXAMPLES.values() for method in several)
    assert not within(S2TMask(), TopEntropyMask()).about.no_op_at


def test_an_aggregation_is_the_identity_on_some_steps() -> None:
    equal = torch.tensor([[1, 1, 1, 1, 0]]).expand(3, 5)
    assert same(loss(SequenceMean(), response_mask=equal), loss(response_mask=equal))
    mean = int(evidence()["response_mask"].sum()) // 3
    assert same(loss(ConstantLength(length=mean)), loss())
    assert not same(loss(ConstantLength(length=mean + 1)), loss())
