"""Objectives and signals on the simulated device: loss and gradient are those of the CPU, bit for bit."""

import pytest
import torch

from benchmarks.modules import stack
from rlstab import ClipHigher, LpReg, PolicyOutputs, TokenBatch, compose, make_plan
from rlstab.core.step import OptimizerStep
from rlstab.presets import PRESETS
from rlstab.signals import SIGNAL_NAMES, token_signals, token_signals_from_logits
from rlstab.train.loop import fixed_order
from tests.core.methods import Unweighted
from tests.core.steps import EVIDENCE, LIVE, batch_of, padded, random_rows
from tests.device.simulated import DEVICE, REAL, simulated_device
from tests.examples import EXAMPLES
from tests.train.runs import small

ROWS = random_rows(11, [3, 5, 0, 7, 4])
OBJECTIVES = {f"{name}-{number}": compose(one) for name, some in EXAMPLES.items() for number, one in enumerate(some)}
OBJECTIVES |= {name: preset.objective for name, preset in PRESETS.items()}
FIRSTS = [name for name in OBJECTIVES if name.endswith("-0")]
DTYPES = torch.float32, torch.bfloat16
KINDS = ("waits", "sends", "queued", "unordered")
COUNTED = pytest.mark.skipif(REAL, reason="nothing is counted on a real device")


def one_step(objective, device, dtype, stray=None):
    """Loss and gradients of a step whose tensors are on a device; those of ``stray`` stay on the CPU."""

    def there(field):
        return padded(ROWS, field).to(dtype).to("cpu" if field == stray else device)

    mask = padded(ROWS, "A").isfinite().to(device)
    evidence = {name: there(field) for name, field in EVIDENCE.items()}
    batch = TokenBatch.from_padded(response_mask=mask, group_ids=torch.arange(len(ROWS)).to(device), **evidence)
    live = {name: there(field).detach().requires_grad_() for name, field in LIVE.items()}
    loss = make_plan(objective, [batch]).loss(batch, PolicyOutputs.from_padded(batch, **live)).loss
    loss.backward()
    return [loss.detach().cpu(), *(values.grad.cpu() for values in live.values() if values.grad is not None)]


@pytest.mark.filterwarnings("ignore:scope")
@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        *zip(DTYPES, [FIRSTS, FIRSTS[::6]], strict=True),
        *(pytest.param(dtype, list(OBJECTIVES), marks=pytest.mark.slow) for dtype in DTYPES),
    ],
)
def test_every_method_and_preset_computes_there_what_it_computes_on_a_cpu(tmp_path, dtype, names):
    """The first settings of each method, and few of them in bfloat16; all with the slow tests."""
    assert len(OBJECTIVES) > 90
    run = small(tmp_path)
    for name in names:
        with simulated_device() as tally, fixed_order(run, DEVICE):
            seen = one_step(OBJECTIVES[name], DEVICE, dtype)
        expected = one_step(OBJECTIVES[name], "cpu", dtype)
        assert REAL or tally.launches > 0
        assert not tally.unordered, name
        assert len(seen) == len(expected) > 1, name
        assert all(map(close if REAL else torch.equal, seen, expected)), name


def close(seen, expected):
    """Equal but for the order of sums."""
    rtol = 1e-4 if seen.dtype == torch.float32 else 0.02
    return torch.allclose(seen.double(), expected.double(), rtol=rtol, atol=1e-7)


@COUNTED
@pytest.mark.parametrize(
    ("methods", "most"),
    [
        ([Unweighted(), LpReg(form="code", share=0.4), ClipHigher(dual_clip=3.0)], (108, 17)),
        (stack(), (328, 38)),
    ],
    ids=["gates, exempt tokens", "36 methods"],
)
def test_a_step_waits_four_times_and_launches_little(methods, most):
    """Two rounds of measuring, counts, the turns that `turn_credit` looks for in either round, and the end.

    No more launches than today: a larger number needs a reason.
    """
    with simulated_device() as tally:
        batch = batch_of(ROWS).to(DEVICE)
        live = {name: padded(ROWS, field).to(DEVICE).requires_grad_() for name, field in LIVE.items()}
        step, policy = OptimizerStep(compose(*methods)), PolicyOutputs.from_padded(batch, **live)
        tally.waits.clear()
        tally.sends.clear()
        step.make_plan([batch])
        planned, tally.launches = tally.waits.total(), 0
        loss = step.loss(0, policy).loss
        forward, tally.launches = tally.launches, 0
        loss.backward()
        assert 1 <= planned == tally.waits.total() <= 3 + 2 * any(method.name == "turn_credit" for method in methods)
        assert 0 < forward <= most[0]
        assert 0 < tally.launches <= most[1]
        step.finish(loss.detach())
    assert tally.waits.total() == planned + 1
    assert not tally.sends


@COUNTED
@pytest.mark.parametrize(
    ("kind", "what", "look"),
    [
        ("waits", "_local_scalar_dense", lambda x: float(x.sum())),
        ("waits", "nonzero", lambda x: x.nonzero()),
        ("waits", "bool index", lambda x: x[x > 0]),
        ("waits", "_unique2", lambda x: x.unique()),
        ("waits", "copy to cpu", lambda x: x.tolist()),
        ("sends", "copy to sim", lambda x: torch.tensor([1.0], device=x.device)),
        ("sends", "copy to sim", lambda x: torch.ones(3).to(x.device)),
        ("sends", "index sent", lambda x: x[torch.arange(2)]),
        ("queued", "copy to sim", lambda x: torch.ones(3).to(x.device, non_blocking=True)),
        ("unordered", "cumsum", lambda x: x.cumsum(0)),
        ("unordered", "index_add", lambda x: x.index_add(0, torch.arange(3, device=x.device), x)),
    ],
)
def test_a_wait_and_a_sum_in_no_fixed_order_are_seen(kind, what, look):
    with simulated_device() as tally:
        there = torch.ones(3).to(DEVICE, non_blocking=True)
        tally.queued.clear()
        look(there)
    seen = {name: {operation for operation, _ in found} for name, found in vars(tally).items() if name in KINDS}
    assert seen == {name: set() for name in KINDS} | {kind: {what}}


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the benchmark of a GPU is tried on a CPU")
@pytest.mark.parametrize("stray", ["A", "H", "logp"])
def test_a_tensor_that_stayed_on_the_cpu_is_refused(stray):
    with simulated_device(), pytest.raises(Exception, match=r"device"):
        one_step(OBJECTIVES["stapo"], DEVICE, torch.float32, stray)


def signals_of(device, dtype, from_logits):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=draw).to(dtype).to(device) for shape in [(9, 8), (40, 8)])
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    ids = (torch.arange(9) * 4).to(device)
    support = torch.stack([ids, (ids + 7) % 40, torch.full_like(ids, -1)], dim=1)
    asked = {"needs": SIGNAL_NAMES, "min_p": 0.1, "support": support}
    if from_logits:
        signals = token_signals_from_logits(hidden @ weight.t(), ids, **asked)
    else:
        signals = token_signals(hidden, weight, ids, **asked)
    values = [value for value in vars(signals).values() if value is not None]
    sum(value.sum() for value in values if value.requires_grad).backward()
    return [each.detach().cpu() for each in [*values, hidden.grad, weight.grad]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("from_logits", [False, True])
def test_token_signals_are_those_of_a_cpu(dtype, from_logits):
    with simulated_device():
        seen = signals_of(DEVICE, dtype, from_logits)
    for mine, theirs in zip(seen, signals_of("cpu", dtype, from_logits), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5 if dtype == torch.float32 else 0.05)
