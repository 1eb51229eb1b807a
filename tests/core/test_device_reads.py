"""Between forward and backward nothing is read off the device: each read would wait for all kernels before it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlstab import STARE, ClipHigher, EntropyBonus, Gate, KLPenalty, LpReg, S2TMask, SequenceMean, compose, make_plan
from tests.core.methods import Unweighted
from tests.core.steps import batch_of, live_of, random_rows

ROWS = random_rows(11, [3, 5, 0, 7, 4])
#: What hands a number, or a shape that only the values decide, to Python.
READS = ("_local_scalar_dense", "aten.nonzero", "aten._unique", "aten.masked_select")


class Reads(TorchDispatchMode):
    """Counts them, on any device: a CPU takes the same path."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(one in str(func) for one in READS):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "methods",
    [
        (ClipHigher(dual_clip=3.0), S2TMask(), STARE(), KLPenalty(), EntropyBonus(), SequenceMean()),
        (Unweighted(), LpReg(form="code", share=0.4), ClipHigher(dual_clip=3.0)),
    ],
    ids=["masks, weights, penalties", "gates, exempt tokens"],
)
def test_the_loss_and_its_backward_read_nothing(methods):
    plan = make_plan(compose(*methods), [batch_of(ROWS)])
    policy, _ = live_of(plan.parts[0].batch, ROWS)
    with Reads() as reads:
        plan.loss(0, policy).loss.backward()
    assert reads.seen == []


def test_a_read_would_be_seen():
    values = torch.ones(3)
    with Reads() as reads:
        assert Gate(lambda ratio, held: ratio * float(ratio.sum())).fn(values, None) is not None
    assert len(reads.seen) == 1
