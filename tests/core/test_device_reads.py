"""Between forward and backward the host waits for nothing, and launches little: counted without a GPU."""

import pytest
import torch

from rlstab import STARE, ClipHigher, EntropyBonus, KLPenalty, LpReg, S2TMask, SequenceMean, compose, make_plan
from tests.core.methods import Unweighted
from tests.core.steps import batch_of, live_of, random_rows
from tests.device.launches import Device

ROWS = random_rows(11, [3, 5, 0, 7, 4])


ALL = (ClipHigher(dual_clip=3.0), S2TMask(), STARE(), KLPenalty(), EntropyBonus(), SequenceMean())
GATES = (Unweighted(), LpReg(form="code", share=0.4), ClipHigher(dual_clip=3.0))


@pytest.mark.parametrize(
    ("methods", "most"),
    [
        ((ClipHigher(),), (26, 61, 8)),
        ((ClipHigher(), S2TMask(), STARE()), (83, 62, 8)),
        ((ClipHigher(dual_clip=3.0), S2TMask(), STARE()), (83, 68, 8)),
        (ALL, (85, 108, 16)),
        (GATES, (50, 120, 17)),
    ],
    ids=["clip", "clip, S2T, STARE", "dual clip, S2T, STARE", "penalties too", "gates, exempt tokens"],
)
def test_the_loss_and_its_backward_wait_for_nothing_and_launch_little(methods, most):
    """No more than today; a larger number needs a reason.

    In a loss six count log-probs above 0, and ten the entropies that are not finite.
    """
    batch, device = batch_of(ROWS), Device()
    with device("plan", may_wait=True):
        plan = make_plan(compose(*methods), [batch])
    policy, _ = live_of(batch, ROWS)
    with device("loss"):
        loss = plan.loss(0, policy).loss
    with device("backward"):
        loss.backward()
    assert device.launches.keys() == {"plan", "loss", "backward"}
    assert all(count <= limit for count, limit in zip(device.launches.values(), most, strict=True)), device.launches


@pytest.mark.parametrize(
    ("what", "look"),
    [
        ("_local_scalar_dense", lambda x: float(x.sum())),
        ("_local_scalar_dense", lambda x: bool((x > 0).all())),
        ("nonzero", lambda x: x.nonzero()),
        ("index", lambda x: x[x > 0]),
        ("_unique2", lambda x: x.unique()),
        ("masked_select", lambda x: x.masked_select(x > 0)),
        ("cpu", lambda x: x.sum().cpu().item()),
        ("tolist", lambda x: x.tolist()),
        ("numpy", lambda x: x.numpy()),
        ("sent", lambda x: torch.tensor(1.0, device=x.device)),
        ("sent", lambda x: torch.ones(3).to(x.device)),
        ("index sent", lambda x: x[torch.arange(2)]),
    ],
)
def test_a_wait_is_seen(what, look):
    values = torch.ones(3)
    with Device()("loss"), pytest.raises(AssertionError, match=what):
        look(values)


def test_what_stays_with_the_host_or_on_the_device_is_no_wait_and_views_launch_nothing():
    values, device = torch.ones(4), Device()
    with device("host"):
        assert float(torch.tensor([1.0, 2.0]).sum()) == 3
        assert torch.arange(3)[torch.arange(3) > 0].tolist() == [1, 2]
    with device("views"):
        (values.view(2, 2)[0].unsqueeze(1).expand(2, 3).t() + 1).mul_(2).detach()
    assert device.launches["views"] == 2
