"""TRL's trainer with the adapter on the simulated device, where TRL is: what a CPU learns, and few waits."""

from contextlib import contextmanager

import pytest
import torch

from benchmarks.waits import figures
from tests.adapters import trl_jobs
from tests.device.on_device_trainer import leave_on_the_cpu
from tests.device.simulated import DEVICE, REAL, simulated_device

OBJECTIVE = [{"name": "clip_higher"}, {"name": "s2t"}, {"name": "stare", "target_entropy": 0.8}]
#: TRL and what it imports warn of their own future.
pytestmark = pytest.mark.filterwarnings("default")


@contextmanager
def trl_there():
    """The accelerator of TRL's trainer is on the device."""
    with pytest.MonkeyPatch.context() as patched, simulated_device() as tally:
        patched.setenv("ACCELERATE_TORCH_DEVICE", str(DEVICE))
        yield tally


@pytest.mark.parametrize("cut", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}])
def test_trl_learns_there_what_it_learns_on_a_cpu(tmp_path, cut):
    cpu = trl_jobs.run(tmp_path / "cpu", OBJECTIVE, dumped=True, **cut)
    with trl_there() as tally:
        sim = trl_jobs.run(tmp_path / "sim", OBJECTIVE, dumped=True, use_cpu=False, **cut)
    assert REAL or tally.launches > 0
    assert len(cpu["steps"]) == len(sim["steps"]) == 4
    for mine, theirs in zip(cpu["steps"], sim["steps"], strict=True):
        assert mine["tokens"] == theirs["tokens"]
        for name, values in mine["weights"].items():
            assert theirs["weights"][name].device == DEVICE
            assert torch.allclose(values, theirs["weights"][name].cpu(), atol=1e-5), name
    assert (tmp_path / "sim" / "dump").is_dir()


@pytest.mark.skipif(REAL, reason="nothing is counted on a real device")
def test_an_optimizer_step_waits_no_more_with_more_methods(tmp_path):
    """The log, which TRL writes after each step here, is one wait more."""
    for methods in (1, 19):
        found = figures(tmp_path, methods, trl=True)
        assert 0 < found["micro-batch"][0] <= 2
        assert 1 < found["optimizer step of one micro-batch"][0] <= 4 + 2 + 1


def test_a_method_that_stays_on_the_cpu_is_refused(tmp_path, monkeypatch):
    leave_on_the_cpu(monkeypatch)
    with trl_there(), pytest.raises(Exception, match="on cpu, expected"):
        trl_jobs.run(tmp_path, OBJECTIVE, max_steps=1, use_cpu=False)
