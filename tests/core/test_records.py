"""Records hold decisions: nobody changes one, and two are never compared tensor by tensor."""

import dataclasses

import pytest

from rlstab import Bounds, LossOutput, Mean, Penalty, Plan, PolicyOutputs, Pool, Terms, Threshold, TokenBatch
from rlstab.core.compose import Composition, Within
from rlstab.core.settings import Range, Setting
from rlstab.core.terms import Totals
from rlstab.zoo import METHODS

WITH_TENSORS = [Bounds, LossOutput, Mean, Penalty, Plan, PolicyOutputs, Pool, Terms, TokenBatch]
PLAIN = [Composition, Range, Setting, Threshold, Totals, Within, *map(METHODS.get, METHODS.names())]


@pytest.mark.parametrize("cls", [*WITH_TENSORS, *PLAIN], ids=lambda cls: cls.__name__)
def test_records_are_constant(cls):
    record = object.__new__(cls)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.anything = None


@pytest.mark.parametrize("cls", WITH_TENSORS, ids=lambda cls: cls.__name__)
def test_records_with_tensors_are_equal_only_to_themselves(cls):
    assert cls.__eq__ is object.__eq__
    assert cls.__hash__ is object.__hash__
