"""TRL's trainer with the adapter on the simulated device, where TRL is installed: what a CPU learns, and few waits."""

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed")

from benchmarks.waits import figures
from tests.adapters import trl_jobs
from tests.device.on_device_trainer import COUNTED, STEP, leave_on_the_cpu
from tests.device.simulated import DEVICE, REAL, accelerate_there

OBJECTIVE = [{"name": "clip_higher"}, {"name": "s2t"}, {"name": "stare", "target_entropy": 0.8}]
#: TRL and what it imports warn of their own future.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("head", ["trl", "rlstab"])
@pytest.mark.parametrize("cut", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}])
def test_trl_learns_there_what_it_learns_on_a_cpu(tmp_path, cut, head):
    given = {"dumped": True, "extra": {"head": head}, **cut}
    cpu = trl_jobs.run(tmp_path / "cpu", OBJECTIVE, **given)
    with accelerate_there() as tally:
        sim = trl_jobs.run(tmp_path / "sim", OBJECTIVE, use_cpu=False, **given)
    assert REAL or tally.launches > 0
    assert len(cpu["steps"]) == len(sim["steps"]) == 4
    for mine, theirs in zip(cpu["steps"], sim["steps"], strict=True):
        assert mine["tokens"] == theirs["tokens"]
        for name, values in mine["weights"].items():
            assert theirs["weights"][name].device == DEVICE
            assert torch.allclose(values, theirs["weights"][name].cpu(), atol=1e-5), name
    assert (tmp_path / "sim" / "dump").is_dir()


@COUNTED
@pytest.mark.parametrize(("head", "most"), [("trl", 6), ("rlstab", 7)])
@pytest.mark.parametrize("methods", [1, 29])
def test_an_optimizer_step_waits_no_more_with_more_methods(tmp_path, head, most, methods):
    """The log, which TRL writes after each step here, is one more; rlstab's head looks for rows with a gradient."""
    found = figures(tmp_path, methods, trl=head)
    assert found["micro-batch"][0] == (head == "rlstab")
    assert 1 < found[STEP][0] <= most + 1
    assert found["micro-batch"][2] == found[STEP][2] == 0


def test_a_method_that_stays_on_the_cpu_is_refused(tmp_path, monkeypatch):
    leave_on_the_cpu(monkeypatch)
    with accelerate_there(), pytest.raises(Exception, match="on cpu, expected"):
        trl_jobs.run(tmp_path, OBJECTIVE, max_steps=1, use_cpu=False)
