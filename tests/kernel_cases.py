"""What the Triton kernels must do, on any device: run by tests/test_signal_kernels.py.

Triton decides when it is imported whether its kernels run in its interpreter, so on a CPU all cases run in a process of
their own: `TRITON_INTERPRET=1 python -m tests.kernel_cases` prints what each raised, in JSON.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from contextlib import contextmanager

import pytest
import torch

from rlstab import signals
from rlstab.errors import RlstabError
from rlstab.signals import SIGNAL_NAMES, token_signals, triton_head
from tests.test_signal_passes import DIFFERENTIABLE, MIN_P, Largest, dense, error, inputs, leaves, reference, total
from tests.tolerances import assert_near

#: No block, tile or slice divides these.
ROWS, WIDTH, VOCAB = 21, 19, 53
#: Roundings of a signal: a product, a softmax, and eight of single functions; of a gradient, the rows as well.
TERMS = WIDTH + VOCAB + 8 + ROWS
#: Bound on the logits, over the temperature.
LOGIT = 30.0
HEADS = {
    "plain": (False, {}),
    "bias": (True, {"temperature": 0.6}),
    "temperature of each row": (False, {"temperature": torch.linspace(0.4, 2.0, ROWS)}),
    "scale": (True, {"logit_scale": 0.5}),
    "softcap": (False, {"softcap": 1.5, "temperature": 0.7}),
    "everything": (True, {"softcap": 2.0, "logit_scale": 1.5, "temperature": torch.linspace(0.4, 2.0, ROWS)}),
}
MIX = torch.randn(5, ROWS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@contextmanager
def small():
    """Several launches, slices of several tiles, and in the backward tiles of several blocks; none comes out even."""
    with sizes((16, 16, 16), 18, 18, 30):
        yield


@contextmanager
def sizes(block, launch, rows, columns):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_head, "BLOCK", block)
        patch.setattr(triton_head, "LAUNCH", launch)
        patch.setattr(signals, "ROWS", rows)
        patch.setattr(signals, "COLUMNS", columns)
        yield


def on(device, options):
    return {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in options.items()}


def drawn(device, dtype=torch.float32, rows=ROWS, vocab=VOCAB):
    hidden, weight, bias, ids = inputs(rows, WIDTH, vocab, torch.float64)
    return (hidden / 2).to(device, dtype), weight.to(device, dtype), bias.to(device, dtype), ids.to(device)


def ours(hidden, weight, bias, ids, needs=SIGNAL_NAMES, **options):
    found = token_signals(hidden, weight, ids, bias=bias, needs=needs, min_p=MIN_P, backend="triton", **options)
    return {name: one for name, one in vars(found).items() if one is not None}


def near(found, expected):
    assert_near(found.cpu(), expected.cpu(), TERMS, size=LOGIT)


def compare(device, biased, options, mix=MIX, needs=SIGNAL_NAMES, given=None):
    """Values and gradients against float64 torch on the same numbers."""
    *tensors, ids = drawn(device) if given is None else given
    one = leaves(*tensors)
    other = leaves(*(tensor.double() for tensor in tensors))
    found = ours(*one[:2], one[2] if biased else None, ids, needs, **on(device, options))
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    expected = reference(*other[:2], other[2] if biased else None, ids, **on(device, wide))
    assert found.keys() == set(needs)
    for name in needs:
        assert found[name].dtype == torch.float32
        near(found[name], expected[name])
    mix = mix.to(device)
    total(found, needs, mix.float()).backward()
    total(expected, needs, mix).backward()
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            near(mine.grad, theirs.grad)
    return one


def heads(name):
    return lambda device: compare(device, *HEADS[name])


def alone(name):
    return lambda device: compare(device, True, {"temperature": 0.7, "softcap": 3.0}, needs={name})


def sparse(device):
    mix = MIX * (torch.arange(ROWS) % 5 == 1)
    hidden, *_ = compare(device, True, {}, mix)
    assert hidden.grad.ne(0).any(-1).tolist() == (torch.arange(ROWS) % 5 == 1).tolist()


def no_live_row(device):
    hidden, weight, bias, ids = drawn(device)
    given = leaves(hidden, weight, bias)
    (ours(*given, ids)["logprobs"] * 0).sum().backward()
    assert all(one.grad is not None and (one.grad == 0).all() for one in given)


def frozen_head(device):
    hidden, weight, _, ids = drawn(device)
    (one, other) = leaves(hidden)[0], leaves(hidden.double())[0]
    ours(one, weight, None, ids)["entropies"].sum().backward()  # an incoming gradient without strides
    reference(other, weight.double(), None, ids)["entropies"].sum().backward()
    near(one.grad, other.grad)
    assert weight.grad is None


def live_rows_alone(device):
    hidden, weight, _, ids = drawn(device)
    given = leaves(hidden, weight)
    found = ours(*given, None, ids)["logprobs"]
    with Largest() as seen:
        found[7].backward()
    assert {shape[:2] for shape in seen.products} <= {(1, 30), (1, 23), (30, 1), (23, 1)}


def nan_stays_visible(device):
    hidden, weight, _, ids = drawn(device)
    given = leaves(hidden, weight)
    g = torch.zeros(ROWS, device=device)
    g[3] = math.nan
    by_hidden, by_weight = torch.autograd.grad(ours(*given, None, ids)["logprobs"], given, g)
    assert by_hidden.isnan().any(-1).nonzero().flatten().tolist() == [3]
    assert by_weight.isnan().all()


def forbidden_tokens(device):
    hidden, weight, bias, ids = drawn(device)
    bias[:33] = -math.inf  # whole slices of them, the first among them
    bias[40] = bias[VOCAB - 1] = -math.inf
    ids = torch.full_like(ids, 37)
    _, weight, bias = compare(device, True, {}, given=(hidden, weight, bias, ids))
    assert (bias.grad[:33] == 0).all()
    assert (weight.grad[40] == 0).all()


def a_row_without_any_allowed_token(device):
    hidden, weight, bias, ids = drawn(device)
    found = ours(hidden, weight, torch.full_like(bias, -math.inf), ids)
    assert found["logprobs"].isnan().all()
    assert found["entropies"].isnan().all()


def kept_mass_on_some_rows(device):
    hidden, weight, bias, ids = drawn(device)
    where = (torch.arange(ROWS) % 3 == 0).to(device)
    found = ours(hidden, weight, bias, ids, {"log_kept_mass"}, rows={"log_kept_mass": where})["log_kept_mass"]
    expected = reference(hidden.double(), weight.double(), bias.double(), ids)["log_kept_mass"]
    near(found, torch.where(where, expected, 0.0))


def any_strides(device):
    hidden, weight, bias, ids = drawn(device)
    given = (hidden.T.contiguous().T, weight.T.contiguous().T, torch.stack([bias, bias], 1)[:, 0])
    assert not any(one.is_contiguous() for one in given)
    every = ids.repeat_interleave(2)[::2]
    temperature = torch.linspace(0.4, 2.0, 2 * ROWS, device=device)[::2]
    mine = ours(*given, every, temperature=temperature)
    theirs = ours(hidden, weight, bias, ids, temperature=temperature.contiguous())
    assert all(torch.equal(mine[name], theirs[name]) for name in SIGNAL_NAMES)
    strided = [one.detach().requires_grad_() for one in given]
    total(ours(*strided, every), SIGNAL_NAMES, MIX.to(device).float()).backward()
    plain = leaves(hidden, weight, bias)
    total(ours(*plain, ids), SIGNAL_NAMES, MIX.to(device).float()).backward()
    for one, other in zip(strided, plain, strict=True):
        near(one.grad, other.grad)


def ends(device):
    for rows, vocab in ((0, 53), (1, 1), (16, 16), (17, 29)):
        given = drawn(device, rows=rows, vocab=vocab)
        compare(device, True, {}, torch.ones(5, rows, dtype=torch.float64), given=given)


def half_precision(dtype):
    def case(device):
        with sizes((32, 64, 64), 64, 32, 128):  # the interpreter's time is by the program
            compare_half(device, dtype)

    return case


def compare_half(device, dtype):
    """No further from float64 than the plain path, which rounds the logits."""
    rows, width, vocab = 40, 64, 300
    hidden, weight, bias, ids = (one.to(device) for one in inputs(rows, width, vocab, torch.float32))
    several = [one.to(dtype) for one in (hidden * 4 / math.sqrt(width), weight, bias)]
    mix = torch.randn(5, rows, generator=torch.Generator().manual_seed(5)).to(device)
    names = {"logprobs", "entropies"}

    def plain(hidden, weight, bias):
        logits = hidden @ weight.T
        return dense((logits if bias is None else logits + bias).float(), ids)

    def wide(hidden, weight, bias):
        return reference(hidden, weight, bias, ids)

    def fused(hidden, weight, bias):
        return ours(hidden, weight, bias, ids)

    for biased in (False, True):  # with a bias the gradient's tiles are float32: their rows are summed
        values, gradients = {}, {}
        for law, kind in ((wide, torch.float64), (plain, dtype), (fused, dtype)):
            given = leaves(*(one.to(kind) for one in several))
            values[law] = law(*given[:2], given[2] if biased else None)
            total(values[law], names, mix).backward()
            gradients[law] = [one.grad for one in given if one.grad is not None]
        for name in names:
            allowed = 1.1 * error(values[plain][name], values[wide][name])
            assert error(values[fused][name], values[wide][name]) <= allowed
        for exact, theirs, mine in zip(gradients[wide], gradients[plain], gradients[fused], strict=True):
            assert mine.dtype == dtype
            assert error(mine, exact) <= 1.1 * error(theirs, exact)


def second_derivative_is_refused(device):
    hidden, weight, _, ids = drawn(device)
    (given,) = leaves(hidden)
    (first,) = torch.autograd.grad(ours(given, weight, None, ids)["entropies"].sum(), given, create_graph=True)
    with pytest.raises(RlstabError, match="first derivative only"):
        torch.autograd.grad(first.square().sum(), given)


CASES = {
    **{f"head: {name}": heads(name) for name in HEADS},
    **{f"alone: {name}": alone(name) for name in DIFFERENTIABLE},
    **{str(dtype): half_precision(dtype) for dtype in (torch.bfloat16, torch.float16)},
    **{
        case.__name__: case
        for case in (
            sparse,
            no_live_row,
            frozen_head,
            live_rows_alone,
            nan_stays_visible,
            forbidden_tokens,
            a_row_without_any_allowed_token,
            kept_mass_on_some_rows,
            any_strides,
            ends,
            second_derivative_is_refused,
        )
    },
}


def main() -> None:
    raised = {}
    with small():
        for name, case in CASES.items():
            try:
                case("cpu")
                raised[name] = ""
            except Exception:
                raised[name] = traceback.format_exc()
    json.dump({"interpreted": triton_head.INTERPRETED, "raised": raised}, sys.stdout)


if __name__ == "__main__":
    main()
