"""verl's batch on the simulated device, where verl is installed: evidence, plan and loss are those of a CPU."""

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed")

from rlstab import ClipHigher, KLPenalty, Mismatch, PolicyOutputs, S2TMask, TruncatedMask, compose, make_plan
from rlstab.adapters.host_correction import HostCorrection
from tests.adapters import jobs, verl_jobs  # the second before verl itself, which trains on a CPU then
from tests.device.simulated import DEVICE, REAL, simulated_device

OBJECTIVE = compose(ClipHigher(), S2TMask(), KLPenalty(), TruncatedMask(), Mismatch(), HostCorrection())


def one_step(device, nested):
    from rlstab.adapters.evidence import UNSCORED
    from rlstab.adapters.verl.batch import MiniBatch

    data = verl_jobs.batch_of(verl_jobs.rollout(0, nested=nested, weights=True, lost=[2]), 0, 1)
    mini = MiniBatch.of(data, device, {jobs.EOS})
    old = mini.columns["old_log_probs"]
    mini.evidence = {"logprobs": old - 0.1, "entropies": -old}
    batch = mini.batch(OBJECTIVE)
    live = (old - 0.2).detach().requires_grad_()
    loss = make_plan(OBJECTIVE, [batch]).loss(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss
    loss.backward()
    lost = batch.extra[UNSCORED].sum()
    return [each.detach().cpu() for each in (loss, live.grad, lost, batch.sequence_ids, batch.group_ids)]


@pytest.mark.parametrize("nested", [True, False])
def test_a_mini_batch_is_there_what_it_is_on_a_cpu(nested):
    with simulated_device() as tally:
        seen = one_step(DEVICE, nested)
    assert REAL or tally.launches > 0
    expected = one_step("cpu", nested)
    assert expected[0] != 0 < expected[2]
    for mine, theirs in zip(seen, expected, strict=True):
        assert torch.allclose(mine.double(), theirs.double(), rtol=1e-5, atol=1e-7)
