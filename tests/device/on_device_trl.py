"""TRL's trainer with the adapter on the simulated device; in the environment of `make test-trl`."""

import pytest
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

from tests.adapters.trl_jobs import run
from tests.device.simulated import DEVICE, REAL, simulated_device

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
OBJECTIVE = ["clip_higher", "s2t", {"name": "stare", "target_entropy": 0.8}]


@pytest.mark.parametrize("head", ["auto", "rlstab"])
def test_the_adapter_learns_there_what_it_learns_on_a_cpu(tmp_path, head):
    given = {
        "extra": {"head": head},
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 2,
    }
    cpu = run(tmp_path / "cpu", OBJECTIVE, **given)
    with pytest.MonkeyPatch.context() as patched, simulated_device() as tally:
        patched.setattr(Accelerator, "device", DEVICE)
        patched.setattr(TrainingArguments, "device", property(lambda args: (args._setup_devices, DEVICE)[1]))
        sim = run(tmp_path / "sim", OBJECTIVE, **given)
    assert REAL or tally.operations["_softmax"] > 0
    assert len(sim["steps"]) == len(cpu["steps"]) == 2
    for mine, theirs in zip(sim["steps"], cpu["steps"], strict=True):
        for name, values in theirs["weights"].items():
            torch.testing.assert_close(
                torch.as_tensor(mine["weights"][name]), torch.as_tensor(values), rtol=1e-4, atol=1e-5
            )
