"""The trainer on the simulated device: it samples the tokens of a CPU, learns what a CPU learns, and seldom waits."""

from dataclasses import replace

import pytest
import torch

from benchmarks.waits import counted, figures
from rlstab import S2TMask, Terms
from rlstab.look.forward import completed
from rlstab.models.policy import Sequences, load_policy
from rlstab.record import Dump, read_dump
from tests.device.simulated import DEVICE, REAL, accelerate_there, simulated_device
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
    "plain": {"tracking__dump_every": 1, "optimisation__old_logprobs": "rollout"},
    "adapter": {**ADAPTER, **STEPS, **WRITTEN, "objective": REFERENCE},
    "stages": {**STAGED, **EVIDENCE, "optimisation__micro_batch_size": 3},
    "less memory": {"optimisation__gradient_checkpointing": True, "optimisation__micro_batch_size": 3},
}
NAMES = [name if name == "plain" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
STEP = "optimizer step of one micro-batch"
COUNTED = pytest.mark.skipif(REAL, reason="nothing is counted on a real device")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """The folder of a run on the CPU, which is trained once."""
    folder = tmp_path_factory.mktemp("cpu")

    def trained(name):
        if not (folder / name).exists():
            go(small(folder / name, **RUNS[name]))
        return folder / name

    return trained


def assert_alike(mine, theirs):
    assert len(mine) == len(theirs) >= 2
    for record, other in zip(mine, theirs, strict=True):
        assert record.keys() == other.keys()
        for key, value in record.items():
            assert other[key] == pytest.approx(value, **ROUNDING), key


@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_learns_there_what_it_learns_on_a_cpu(tmp_path, on_cpu, name):
    cpu = on_cpu(name)
    for float64 in (True,) if REAL else (True, False):  # without, as Apple's mps is
        sim = tmp_path / f"sim {float64}"
        with accelerate_there(float64=float64) as tally:
            go(small(sim, **RUNS[name]))
        assert about(sim)["device"] == str(DEVICE)
        assert_alike(metrics(cpu), metrics(sim))
        assert lines(sim / "samples.jsonl") == lines(cpu / "samples.jsonl") != []
        assert apart(cpu, sim) < 1e-3
        assert REAL or tally.launches > 0
        assert not tally.unordered
        if float64 and name == "plain":  # no more than today, most of them to write two dumps
            assert counted(tally)[0] <= 112


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_of_the_other_device(tmp_path):
    def run(out, rollouts):
        return small(tmp_path / out, optimisation__rollouts=rollouts, tracking__checkpoint_every=1)

    go(run("cpu", 3))
    go(run("moved", 1))
    with accelerate_there():
        go(run("moved", 2), resume=True)
    go(run("moved", 3), resume=True)
    assert_alike(metrics(tmp_path / "cpu"), metrics(tmp_path / "moved"))


def test_a_forward_in_autocast_is_that_of_a_cpu():
    ids, whole = torch.arange(24).view(3, 8) % 20 + 3, torch.ones(3, 8, dtype=torch.bool)

    def forward(device, precision):
        policy = load_policy("countdown-tiny", device=device, precision=precision)
        sequences, index = Sequences(ids, whole, ids.flip(1), whole), torch.arange(24)
        signals = policy.signals(sequences, index, needs={"logprobs"}, temperature=1.0)
        signals.logprobs.sum().backward()
        gradients = [weight.grad.cpu().reshape(-1) for weight in policy.model.parameters()]
        return signals.logprobs.detach().cpu(), torch.cat(gradients)

    exact, narrow = forward("cpu", "fp32"), forward("cpu", "bf16")
    with simulated_device():
        seen = forward(DEVICE, "bf16")
    for values, cpu, truth in zip(seen, narrow, exact, strict=True):
        assert 0 < (cpu - truth).norm() <= 0.05 * truth.norm()
        assert (values - truth).norm() <= 2 * (cpu - truth).norm()


def test_the_model_of_a_run_adds_there_what_it_adds_on_a_cpu(on_cpu, monkeypatch):
    step = read_dump(on_cpu("plain") / "dump").steps[0]
    bare = Dump([replace(step, tensors={name: step.tensors[name] for name in KEPT})])
    added = {}
    for device in (None, DEVICE):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda device=device, **_: device)
        with simulated_device() as tally:
            added[device] = completed(bare, "countdown-tiny", quiet()).steps[0].tensors
        assert REAL or (tally.launches > 0) == (device is DEVICE)
    assert added[None].keys() == added[DEVICE].keys() > KEPT
    for name, values in added[None].items():
        assert torch.allclose(values.double(), added[DEVICE][name].double(), rtol=1e-3, atol=1e-4), name


def leave_on_the_cpu(patched):
    """From now on S2T makes its weights on the CPU."""
    patched.setattr(S2TMask, "terms", lambda self, batch, stat, state: Terms(keep=torch.zeros(len(batch)) == 0))


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the benchmark of a GPU is tried on a CPU")
def test_a_method_on_the_cpu_is_refused_and_without_the_setting_a_gpu_adds_in_no_fixed_order(tmp_path, monkeypatch):
    leave_on_the_cpu(monkeypatch)
    with accelerate_there() as tally, pytest.raises(Exception, match="on cpu, expected"):
        go(small(tmp_path / "sim", ["s2t"], rollout__max_new_tokens=2, optimisation__deterministic=False))
    assert REAL or "models/decoding.py" in {line.partition(":")[0] for _, line in tally.unordered}
    assert not torch.are_deterministic_algorithms_enabled()


@COUNTED
@pytest.mark.slow
@pytest.mark.parametrize("methods", [1, 29])
def test_a_step_waits_four_times_and_twice_for_each_micro_batch_and_decoding_for_one_token_in_eight(tmp_path, methods):
    found = figures(tmp_path, methods)
    assert found.keys() == {"decoded token", "micro-batch", STEP, "the same with fresh evidence", "dumped micro-batch"}
    assert not any(blocking for _, _, blocking, _ in found.values())
    for row, most in {"decoded token": 1 / 8, "micro-batch": 2, STEP: 6, "the same with fresh evidence": 6}.items():
        assert 0 < found[row][0] <= most
    assert found["decoded token"][1] == 0
