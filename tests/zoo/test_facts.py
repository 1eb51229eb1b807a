"""What classes declare of their limits and of each other: true, and said once."""

from __future__ import annotations

import itertools
import re
from typing import get_args

import pytest
import torch

from rlstab import ClipHigher, ConstantLength, LpReg, S2TMask, SequenceMean, TopEntropyMask, compose, make_plan, within
from rlstab.core.batch import TokenBatch
from rlstab.core.metadata import MASK, Interaction, Kind
from rlstab.core.objective import TokenObjective
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.settings import settings_of
from rlstab.errors import Conflict
from tests.examples import EXAMPLES
from tests.zoo.watch import evidence, examples, live, shipped

METHODS = {cls.name: cls for cls in shipped()}
DECLARED = [(name, one) for name, cls in METHODS.items() for one in cls.about.interacts]
every_method = pytest.mark.parametrize("cls", [pytest.param(cls, id=name) for name, cls in METHODS.items()])
every_interaction = pytest.mark.parametrize(
    ("name", "one"), [pytest.param(name, one, id=f"{name}: {one.others}") for name, one in DECLARED]
)


# -- interactions ------------------------------------------------------------------------------------------------------


@every_interaction
def test_an_interaction_names_other_methods_that_exist(name: str, one: Interaction) -> None:
    assert set(one.names) <= METHODS.keys() - {name} | {MASK}
    assert one.kind in get_args(Kind)


@every_interaction
def test_its_sentence_names_both(name: str, one: Interaction) -> None:
    said = one.says(name, *one.names)
    assert said.endswith(".")
    assert all(f"`{key}`" in said or key == MASK in said for key in one.names), said
    assert f"`{name}`" in said or said.startswith("both "), said
    assert set(re.findall(r"`(\w+)`", said)) <= METHODS.keys() | {
        setting.name for cls in METHODS.values() for setting in settings_of(cls)
    }


def test_no_interaction_is_declared_on_both_sides() -> None:
    pairs = {(name, other) for name, one in DECLARED for other in one.names}
    assert {(one, other) for one, other in pairs if (other, one) in pairs} == set()


def test_no_pair_is_good_together_and_in_each_others_way() -> None:
    kinds = {}
    for name, one in DECLARED:
        for other in one.names:
            kinds.setdefault(frozenset({name, other}), set()).add(one.kind)
    assert [pair for pair, found in kinds.items() if "good" in found and found & {"conflicts", "redundant"}] == []


@every_interaction
def test_each_is_found_at_some_settings(name: str, one: Interaction) -> None:
    for other in (key for key in METHODS if key in one.names or (MASK in one.names and key == "s2t")):
        candidates = itertools.product([*EXAMPLES[name], *examples(METHODS[name])], EXAMPLES[other])
        assert any(one.holds(*pair) for pair in [*candidates, (S2TMask(population="all"), TopEntropyMask(share=0.1))])


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


@every_method
@pytest.mark.parametrize("base", [(), (ClipHigher(low=0.1, high=0.1),)], ids=["plain", "clipped"])
def test_limits_are_the_identity_bit_for_bit(cls: type[TokenObjective], base: tuple[TokenObjective, ...]) -> None:
    """Whatever the other settings are, alone and beside a clip."""
    without = losses(*base)
    for method in [*examples(cls), *EXAMPLES[cls.name]]:
        for limit in cls.about.no_op_at:
            if limit.settings is not None:
                limited = limit.at(method)
                assert limit.reached(limited)
                if _composes(*base, limited):
                    found = losses(*base, limited)
                    assert all(torch.equal(one, other) for one, other in zip(found, without, strict=True)), limited


@every_method
def test_a_method_says_where_it_is_the_identity(cls: type[TokenObjective]) -> None:
    assert cls.about.no_op_at
    names = {one.name for one in settings_of(cls)}
    for limit in cls.about.no_op_at:
        assert limit.why.endswith(".")
        assert (limit.settings or {}).keys() <= names
        assert limit.why[0].isupper() == (not limit.settings)


def test_a_limit_of_steps_is_reached_by_no_setting() -> None:
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
