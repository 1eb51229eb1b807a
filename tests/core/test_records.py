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


def test_records_are_constant():
    for cls in [*WITH_TENSORS, *PLAIN]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            object.__new__(cls).anything = None


def test_records_with_tensors_are_equal_only_to_themselves():
    for cls in WITH_TENSORS:
        assert (cls.__eq__, cls.__hash__) == (object.__eq__, object.__hash__)
