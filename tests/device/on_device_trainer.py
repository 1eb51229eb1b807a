"""The trainer on the simulated device: it samples the tokens of a CPU, and learns what a CPU learns."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator

from rlstab import S2TMask, Terms
from rlstab.look.forward import completed
from rlstab.models.policy import Sequences, load_policy
from rlstab.record import Dump, read_dump
from tests.device.simulated import DEVICE, REAL, simulated_device
from tests.train.runs import ADAPTER, STAGED, about, apart, go, lines, metrics, quiet, small

#: Fused attention has another rounding than the composed form that this device has.
ROUNDING = {"rel": 1e-3, "abs": 2e-5}
REFERENCE = ["clip_higher", {"name": "kl", "coefficient": 0.01}]
EVIDENCE = {"rollout__staleness": 1, "rollout__precision": "int8", "rollout__weight_noise": 0.01}
STEPS = {"optimisation__epochs": 2, "optimisation__mini_batches": 2, "optimisation__refresh": "step"}
WRITTEN = {"optimisation__old_logprobs": "recompute", "tracking__dump_every": 1, "evaluation__every": 1}
#: What a dump of any host has.
KEPT = {"ids", "lengths", "mask", "logprobs", "old_logprobs", "advantages", "prompt_ids", "prompt_lengths"}
#: Every option of the trainer that computes something, in as few runs as that takes.
RUNS = {
    "plain": {},
    "adapter": {**ADAPTER, **STEPS, **WRITTEN, "objective": REFERENCE},
    "stages": {**STAGED, **EVIDENCE, "optimisation__micro_batch_size": 3},
    "less memory": {"optimisation__gradient_checkpointing": True, "optimisation__micro_batch_size": 3},
}
NAMES = [name if name == "plain" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]


@contextmanager
def trainer_there(**options):
    """The trainer's accelerator is on the device."""
    with pytest.MonkeyPatch.context() as patched, simulated_device(**options) as tally:
        patched.setattr(Accelerator, "device", DEVICE)
        yield tally


def assert_alike(mine, theirs):
    assert len(mine) == len(theirs) >= 2
    for record, other in zip(mine, theirs, strict=True):
        assert record.keys() == other.keys()
        for key, value in record.items():
            assert other[key] == pytest.approx(value, **ROUNDING), key


@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_learns_there_what_it_learns_on_a_cpu(tmp_path, name):
    go(small(tmp_path / "cpu", **RUNS[name]))
    for float64 in (True,) if REAL or name == "plain" else (True, False):  # without, as Apple's mps is
        where = tmp_path / f"sim {float64}"
        with trainer_there(float64=float64) as tally:
            go(small(where, **RUNS[name]))
        assert about(where)["device"] == str(DEVICE)
        assert_alike(metrics(tmp_path / "cpu"), metrics(where))
        assert lines(where / "samples.jsonl") == lines(tmp_path / "cpu" / "samples.jsonl") != []
        assert apart(tmp_path / "cpu", where) < 1e-3
        assert REAL or tally.operations["_softmax"] > 0
        assert not tally.unordered


def test_a_forward_in_autocast_is_that_of_a_cpu():
    ids = torch.arange(24).view(3, 8) % 20 + 3
    whole = torch.ones(3, 8, dtype=torch.bool)

    def forward(device, precision):
        policy = load_policy("countdown-tiny", device=device, precision=precision)
        asked = {"needs": {"logprobs"}, "temperature": 1.0}
        signals = policy.signals(Sequences(ids, whole, ids.flip(1), whole), torch.arange(24), **asked)
        signals.logprobs.sum().backward()
        gradients = [weight.grad.cpu().reshape(-1) for weight in policy.model.parameters()]
        return signals.logprobs.detach().cpu(), torch.cat(gradients)

    exact, narrow = forward("cpu", "fp32"), forward("cpu", "bf16")
    with simulated_device():
        seen = forward(DEVICE, "bf16")
    for values, cpu, truth in zip(seen, narrow, exact, strict=True):
        assert 0 < (cpu - truth).norm() <= 0.05 * truth.norm()
        assert (values - truth).norm() <= 2 * (cpu - truth).norm()


@pytest.mark.skipif(REAL, reason="nothing is counted on a real device")
def test_without_the_setting_a_gpu_adds_in_no_fixed_order(tmp_path):
    with trainer_there() as tally:
        few = {"optimisation__rollouts": 1, "rollout__max_new_tokens": 4}
        go(small(tmp_path / "run", optimisation__deterministic=False, **few))
    assert {line.partition(":")[0] for _, line in tally.unordered} >= {"train/sampling.py", "core/sequences.py"}
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_the_other_device(tmp_path):
    def run(out, rollouts):
        return small(tmp_path / out, optimisation__rollouts=rollouts, tracking__checkpoint_every=1)

    go(run("cpu", 3))
    go(run("moved", 1))
    with trainer_there():
        go(run("moved", 2), resume=True)
    go(run("moved", 3), resume=True)
    assert_alike(metrics(tmp_path / "cpu"), metrics(tmp_path / "moved"))


def test_the_model_of_a_run_adds_there_what_it_adds_on_a_cpu(tmp_path, monkeypatch):
    few = {"optimisation__rollouts": 1, "rollout__max_new_tokens": 4}
    go(small(tmp_path, tracking__dump_every=1, optimisation__old_logprobs="rollout", **few))
    dump = read_dump(tmp_path / "dump")
    bare = [replace(step, tensors={name: step.tensors[name] for name in KEPT}) for step in dump.steps]
    if not REAL:  # torch's forward mode does not know such a device
        monkeypatch.setattr("rlstab.look.forward.entropy_slopes", lambda _, step, __: torch.zeros(len(step.mask)))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    (cpu,) = completed(Dump(bare), "countdown-tiny", quiet()).steps
    with simulated_device() as tally:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: DEVICE)
        (sim,) = completed(Dump(bare), "countdown-tiny", quiet()).steps
    assert REAL or tally.launches > 0
    assert cpu.tensors.keys() == sim.tensors.keys() > KEPT
    for name, values in cpu.tensors.items():
        assert torch.allclose(values.double(), sim.tensors[name].double(), rtol=1e-3, atol=1e-4), name


def leave_on_the_cpu(patched):
    """From now on S2T makes its weights on the CPU."""
    patched.setattr(S2TMask, "terms", lambda self, batch, stat, state: Terms(keep=torch.zeros(len(batch)) == 0))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the benchmark of a GPU is tried on a CPU")
def test_a_method_that_stays_on_the_cpu_is_refused(tmp_path, monkeypatch):
    leave_on_the_cpu(monkeypatch)
    with trainer_there(), pytest.raises(Exception, match="on cpu, expected"):
        go(small(tmp_path / "sim", ["s2t"], rollout__max_new_tokens=2))
