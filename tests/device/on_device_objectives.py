"""Objectives and signals on the simulated device: loss and gradient are those of the CPU, bit for bit."""

import pytest
import torch
from torch.utils import deterministic

from rlstab import (
    STARE,
    ClipHigher,
    EntropyBonus,
    KLPenalty,
    LpReg,
    PolicyOutputs,
    S2TMask,
    SequenceMean,
    TokenBatch,
    compose,
    make_plan,
)
from rlstab.presets import PRESETS
from rlstab.signals import SIGNAL_NAMES, token_signals, token_signals_from_logits
from tests.core.methods import Unweighted
from tests.core.steps import EVIDENCE, LIVE, batch_of, padded, random_rows
from tests.device.simulated import DEVICE, REAL, simulated_device
from tests.examples import EXAMPLES

ROWS = random_rows(11, [3, 5, 0, 7, 4])
OBJECTIVES = {f"{name}-{number}": compose(one) for name, some in EXAMPLES.items() for number, one in enumerate(some)}
OBJECTIVES |= {name: preset.objective for name, preset in PRESETS.items()}


def one_step(objective, device, dtype, stray=None):
    """Loss and gradients of a step whose tensors are on a device; those of ``stray`` stay on the CPU."""

    def there(field):
        return padded(ROWS, field).to(dtype).to("cpu" if field == stray else device)

    mask = (padded([[{"one": 1.0} for _ in tokens] for tokens in ROWS], "one") == 1).to(device)
    evidence = {name: there(field) for name, field in EVIDENCE.items()}
    groups = torch.arange(len(ROWS)).to(device)
    batch = TokenBatch.from_padded(response_mask=mask, group_ids=groups, **evidence)
    live = {name: there(field).detach().requires_grad_() for name, field in LIVE.items()}
    plan = make_plan(objective, [batch])
    loss = plan.loss(batch, PolicyOutputs.from_padded(batch, **live)).loss
    loss.backward()
    return [loss.detach().cpu(), *(values.grad.cpu() for values in live.values() if values.grad is not None)]


@pytest.mark.filterwarnings("ignore:scope")
@pytest.mark.parametrize(
    ("dtype", "every"),
    [
        (torch.float32, 2),
        (torch.bfloat16, 12),
        *(pytest.param(dtype, 1, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_every_method_and_preset_computes_there_what_it_computes_on_a_cpu(dtype, every, monkeypatch):
    """The first settings of each method, and few of them in bfloat16; all with the slow tests."""
    assert len(OBJECTIVES) > 90
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", False)
    firsts = [name for name in OBJECTIVES if every == 1 or name.endswith("-0")]
    for name in firsts[:: max(1, every // 2)]:
        objective = OBJECTIVES[name]
        with simulated_device() as tally:
            torch.use_deterministic_algorithms(True)
            try:
                seen = one_step(objective, DEVICE, dtype)
            finally:
                torch.use_deterministic_algorithms(False)
        expected = one_step(objective, "cpu", dtype)
        assert REAL or tally.operations["mul"] > 0
        assert not tally.unordered, name
        assert len(seen) == len(expected) > 1, name
        assert all(map(close if REAL else torch.equal, seen, expected)), name


def close(seen, expected):
    """Equal but for the order of sums."""
    return torch.allclose(
        seen.double(), expected.double(), rtol=1e-4 if seen.dtype == torch.float32 else 0.02, atol=1e-7
    )


ONLY = pytest.mark.skipif(REAL, reason="nothing is counted on a real device")
ALL = (ClipHigher(dual_clip=3.0), S2TMask(), STARE(), KLPenalty(), EntropyBonus(), SequenceMean())
GATES = (Unweighted(), LpReg(form="code", share=0.4), ClipHigher(dual_clip=3.0))


@pytest.mark.parametrize(
    ("methods", "most"),
    [
        ((ClipHigher(),), (61, 8)),
        ((ClipHigher(), S2TMask(), STARE()), (62, 8)),
        (ALL, (108, 16)),
        (GATES, (120, 17)),
    ],
    ids=["clip", "clip, S2T, STARE", "penalties too", "gates, exempt tokens"],
)
@ONLY
def test_the_loss_and_its_backward_wait_for_nothing_and_launch_little(methods, most):
    """No more launches than today; a larger number needs a reason."""
    with simulated_device() as tally:
        batch = batch_of(ROWS).to(DEVICE)
        plan = make_plan(compose(*methods), [batch])
        assert tally.waits
        live = {name: padded(ROWS, field).to(DEVICE).requires_grad_() for name, field in LIVE.items()}
        policy = PolicyOutputs.from_padded(batch, **live)
        for counter in (tally.waits, tally.sends):
            counter.clear()
        tally.launches = 0
        loss = plan.loss(batch, policy).loss
        forward, tally.launches = tally.launches, 0
        loss.backward()
    assert not tally.waits
    assert not tally.sends
    assert 0 < forward <= most[0]
    assert 0 < tally.launches <= most[1]


@pytest.mark.parametrize(
    ("kind", "what", "look"),
    [
        ("waits", "_local_scalar_dense", lambda x: float(x.sum())),
        ("waits", "nonzero", lambda x: x.nonzero()),
        ("waits", "bool index", lambda x: x[x > 0]),
        ("waits", "_unique2", lambda x: x.unique()),
        ("waits", "masked_select", lambda x: x.masked_select(x > 0)),
        ("waits", "copy to cpu", lambda x: x.cpu()),
        ("waits", "tolist", lambda x: x.tolist()),
        ("sends", "copy to sim", lambda x: torch.tensor([1.0], device=x.device)),
        ("sends", "copy to sim", lambda x: torch.ones(3).to(x.device)),
        ("sends", "index sent", lambda x: x[torch.arange(2)]),
        ("queued", "copy to sim", lambda x: torch.ones(3).to(x.device, non_blocking=True)),
    ],
)
@ONLY
def test_a_wait_is_seen(kind, what, look):
    with simulated_device() as tally:
        look(torch.ones(3).to(DEVICE, non_blocking=True))
    tally.queued["copy to sim", "elsewhere"] -= 1
    seen = {
        name: sorted({operation for operation, _ in +getattr(tally, name)}) for name in ("waits", "sends", "queued")
    }
    assert seen == {"waits": [], "sends": [], "queued": [], kind: [what]}


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the benchmark of a GPU is tried on a CPU")
@pytest.mark.parametrize("stray", ["A", "H", "logp"])
def test_a_tensor_that_stayed_on_the_cpu_is_refused(stray):
    with simulated_device(), pytest.raises(Exception, match=r"device"):
        one_step(OBJECTIVES["stapo"], DEVICE, torch.float32, stray)


def signals_of(device, dtype, make):
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=draw).to(dtype).to(device) for shape in [(9, 8), (40, 8)])
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    ids = (torch.arange(9) * 4).to(device)
    signals = make(hidden, weight, ids)
    values = [value for value in vars(signals).values() if value is not None]
    sum(value.sum() for value in values if value.requires_grad).backward()
    return [each.detach().cpu() for each in [*values, hidden.grad, weight.grad]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("from_logits", [False, True])
def test_token_signals_are_those_of_a_cpu(dtype, from_logits):
    def make(hidden, weight, ids):
        if from_logits:
            return token_signals_from_logits(hidden @ weight.t(), ids, needs=SIGNAL_NAMES, min_p=0.1)
        return token_signals(hidden, weight, ids, needs=SIGNAL_NAMES, min_p=0.1)

    with simulated_device():
        seen = signals_of(DEVICE, dtype, make)
    for mine, theirs in zip(seen, signals_of("cpu", dtype, make), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5 if dtype == torch.float32 else 0.05)
