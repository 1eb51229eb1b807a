import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstab.core import compare as module
from rlstab.core.compare import below, indices, reached
from rlstab.core.stats import total
from rlstab.core.surrogate import with_slope
from rlstab.testing.tolerances import REORDERED
from tests.core.steps import batch_of, random_rows

quick = settings(max_examples=40, deadline=None, derandomize=True, database=None)
EDGE = [0.0, -0.0, 1.0, -1.0, 2.0**-149, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@quick
@given(number=st.floats(width=64), near=st.integers(-2, 2))
def test_a_number_between_two_values_compares_as_in_float64(dtype, number, near):
    values = [torch.tensor(number, dtype=dtype)]
    for _ in range(abs(near)):
        values.append(values[-1].nextafter(torch.tensor(math.copysign(math.inf, near), dtype=dtype)))
    values = torch.cat([torch.stack(values), torch.tensor(EDGE, dtype=dtype)])
    assert torch.equal(reached(values, number), values.double() >= number)
    assert torch.equal(below(values, number), values.double() < number)


def test_indices_and_numbers_between_integers():
    assert indices((torch.tensor(EDGE) > 0)[::2]).tolist() == [1, 2]
    assert reached(torch.tensor([0, 1, 2]), 0.5).tolist() == [False, True, True]
    assert below(torch.tensor([0, 1, 2]), 0.5).tolist() == [True, False, False]


def test_pieces_change_no_result(monkeypatch):
    batch = batch_of(random_rows(0, [4, 1, 6, 0, 3]))
    drawn, added = batch.uniform(5), total(batch.logprobs.float())
    monkeypatch.setattr(module, "CHUNK", 3)
    assert torch.equal(batch.uniform(5), drawn)
    assert total(batch.logprobs.float()).item() == pytest.approx(added.item(), rel=REORDERED)
    assert total(torch.tensor([[1.0, 2.0], [3.0, 4.0]])) == 10
    assert total(torch.zeros(0)) == 0


def test_a_slope_that_was_given_is_the_derivative_and_has_none():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = with_slope(x, torch.tensor([7.0, 8.0]), torch.tensor([0.0, 3.0]))
    assert y.tolist() == [7.0, 8.0]
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert gradient.tolist() == [0.0, 48.0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
