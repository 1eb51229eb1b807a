"""What classes declare of their limits and of each other: true, and said once."""

from __future__ import annotations

import itertools
from typing import get_args

import torch

from rlstab import ConstantLength, LpReg, S2TMask, SequenceMean, TopEntropyMask, compose, make_plan, within
from rlstab.core.batch import TokenBatch
from rlstab.core.metadata import MASK, Kind
from rlstab.core.objective import TokenObjective
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.errors import Conflict
from tests.examples import EXAMPLES
from tests.zoo.watch import evidence, examples, live, shipped

METHODS = {cls.name: cls for cls in shipped()}
DECLARED = [(name, one) for name, cls in METHODS.items() for one in cls.about.interacts]


# -- interactions ------------------------------------------------------------------------------------------------------


def test_an_interaction_names_methods_that_exist_and_holds_at_some_settings() -> None:
    for name, interaction in DECLARED:
        assert set(interaction.names) <= METHODS.keys() - {name} | {MASK}
        assert interaction.kind in get_args(Kind)
        sentence = interaction.says(name, *interaction.names)
        assert all(f"`{key}`" in sentence or key == MASK in sentence for key in interaction.names), sentence
        for other in (
            key for key in METHODS if key in interaction.names or (MASK in interaction.names and key == "s2t")
        ):
            pairs = itertools.product([*EXAMPLES[name], *examples(METHODS[name])], EXAMPLES[other])
            special = (S2TMask(population="all"), TopEntropyMask(share=0.1))
            assert any(interaction.holds(*pair) for pair in [*pairs, special]), (name, other)


def test_no_interaction_is_declared_on_both_sides() -> None:
    pairs = {(name, other) for name, one in DECLARED for other in one.names}
    assert {(one, other) for one, other in pairs if (other, one) in pairs} == set()


def test_no_pair_is_good_together_and_in_each_others_way() -> None:
    kinds = {}
    for name, one in DECLARED:
        for other in one.names:
            kinds.setdefault(frozenset({name, other}), set()).add(one.kind)
    assert [pair for pair, found in kinds.items() if "good" in found and found & {"conflicts", "redundant"}] == []


def test_those_that_are_good_together_compose() -> None:
    for name, one in DECLARED:
        if one.kind == "good":
            for other in one.names:
                assert any(_composes(*pair) for pair in itertools.product(EXAMPLES[name], EXAMPLES[other]))


def _composes(*methods: TokenObjective) -> bool:
    try:
        return bool(compose(*methods).members)
    except Conflict:
        return False


# -- limits ------------------------------------------------------------------------------------------------------------


def losses(*methods: TokenObjective) -> list[torch.Tensor]:
    """Loss and gradients of three steps with state."""
    tensors = evidence()
    batch, objective, state = TokenBatch.from_padded(**tensors), compose(*methods), None
    found = []
    for _ in range(3):
        outputs = live(tensors)
        plan = make_plan(objective, [batch], state)
        loss = plan.loss(batch, PolicyOutputs.from_padded(batch, **outputs)).loss
        loss.backward()
        found.append(loss.detach())
        found += [torch.zeros_like(one) if one.grad is None else one.grad for one in outputs.values()]
        state = plan.state
    return found


def test_a_limit_of_steps_is_reached_by_no_setting() -> None:
    assert all(cls.about.no_op_at for cls in METHODS.values())
    nowhere = [limit for cls in METHODS.values() for limit in cls.about.no_op_at if limit.settings is None]
    assert nowhere
    assert not any(limit.reached(one) for limit in nowhere for several in EXAMPLES.values() for one in several)
    assert not within(S2TMask(), TopEntropyMask()).about.no_op_at


def test_sequence_mean_is_the_identity_on_equal_lengths() -> None:
    tensors = evidence()
    tensors["response_mask"] = torch.tensor([[1, 1, 1, 1, 0]]).expand(3, 5)
    batch = TokenBatch.from_padded(**tensors)
    policy = PolicyOutputs.from_padded(batch, **live(tensors))
    assert torch.equal(compose(SequenceMean())(batch, policy).loss, compose()(batch, policy).loss)


def test_constant_length_is_the_identity_at_the_mean_length() -> None:
    mean = int(evidence()["response_mask"].sum()) // 3
    found = zip(losses(ConstantLength(length=mean)), losses(), strict=True)
    assert all(torch.equal(one, other) for one, other in found)
    assert not torch.equal(losses(ConstantLength(length=mean + 1))[0], losses()[0])


def test_lp_reg_in_form_code_selects_none_of_few() -> None:
    """Three tokens are punished: fewer than 2 / 0.6, and more than 2 / 0.7."""
    few, enough = (losses(LpReg(form="code", share=share)) for share in (0.6, 0.7))
    assert all(torch.equal(one, other) for one, other in zip(few, losses(), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(enough, losses(), strict=True))
