"""The trainer on the simulated device: it samples the tokens of a CPU, and learns what a CPU learns."""

from contextlib import contextmanager

import pytest
import torch
from accelerate import Accelerator

from tests.device.simulated import simulated_device
from tests.train.runs import ADAPTER, STAGED, about, apart, go, lines, metrics, small

#: Fused attention has another rounding than the composed form that this device has.
ROUNDING = {"rel": 1e-3, "abs": 2e-5}
REFERENCE = ["clip_higher", {"name": "kl", "coefficient": 0.01}]
EVIDENCE = {"rollout__staleness": 1, "rollout__precision": "int8", "rollout__weight_noise": 0.01}
STEPS = {"optimisation__epochs": 2, "optimisation__mini_batches": 2, "optimisation__refresh": "step"}
WRITTEN = {"tracking__trace_every": 1, "tracking__dump_every": 1, "evaluation__every": 1}
#: Every option of the trainer that computes something, in as few runs as that takes.
RUNS = {
    "plain": {},
    "adapter, reference": {**ADAPTER, **STEPS, **WRITTEN, "objective": REFERENCE, "optimisation__old_logprobs": "recompute"},
    "stages, another sampler": {**STAGED, **EVIDENCE, "optimisation__micro_batch_size": 3},
}


@contextmanager
def trainer_there(**options):
    """The trainer's accelerator is on the device."""
    with pytest.MonkeyPatch.context() as patched, simulated_device(**options) as tally:
        patched.setattr(Accelerator, "device", torch.device("sim:0"))
        yield tally


@pytest.mark.parametrize("name", RUNS)
def test_the_trainer_learns_there_what_it_learns_on_a_cpu(tmp_path, name):
    runs = [small(tmp_path / where, **RUNS[name]) for where in ("cpu", "sim")]
    go(runs[0])
    with trainer_there() as tally:
        go(runs[1])
    here, there = (metrics(tmp_path / where) for where in ("cpu", "sim"))
    assert [about(tmp_path / where)["device"] for where in ("cpu", "sim")] == ["cpu", "sim:0"]
    assert tally.operations["_softmax"] > 0
    assert len(here) == len(there) >= 2
    for mine, theirs in zip(here, there, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"device/peak_memory"}:
            assert theirs[key] == pytest.approx(mine[key], **ROUNDING), key
    samples = [lines(tmp_path / where / "samples.jsonl") for where in ("cpu", "sim")]
    assert len(samples[0]) > 0
    assert samples[0] == samples[1]
    assert apart(tmp_path / "cpu", tmp_path / "sim") < 1e-3


@pytest.mark.parametrize("name", RUNS)
def test_a_device_without_float64_trains_as_well(tmp_path, name):
    runs = [small(tmp_path / where, **RUNS[name]) for where in ("cpu", "sim")]
    go(runs[0])
    with trainer_there(float64=False):
        go(runs[1])
    for mine, theirs in zip(*(metrics(tmp_path / where) for where in ("cpu", "sim")), strict=True):
        for key in mine:
            assert theirs[key] == pytest.approx(mine[key], **ROUNDING), key
