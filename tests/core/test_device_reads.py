"""Between forward and backward the host waits for nothing, and launches little: counted without a GPU."""

from collections import Counter

import pytest
import torch

from rlstab import STARE, ClipHigher, EntropyBonus, KLPenalty, LpReg, S2TMask, SequenceMean, compose, make_plan
from tests.core.methods import Unweighted
from tests.core.steps import batch_of, live_of, random_rows
from tests.waits import Waits

ROWS = random_rows(11, [3, 5, 0, 7, 4])


def of_a_part(*methods):
    """The waits and launches of a plan for one part, of its loss, and of the backward through it."""
    batch = batch_of(ROWS)
    waits = Waits("plan")
    with waits():
        plan = make_plan(compose(*methods), [batch])
    policy, _ = live_of(batch, ROWS)
    waits.phase = "loss"
    with waits():
        loss = plan.loss(0, policy).loss
        waits.phase = "backward"
        loss.backward()
    return waits


@pytest.mark.parametrize(
    "methods",
    [
        (ClipHigher(dual_clip=3.0), S2TMask(), STARE(), KLPenalty(), EntropyBonus(), SequenceMean()),
        (Unweighted(), LpReg(form="code", share=0.4), ClipHigher(dual_clip=3.0)),
    ],
    ids=["masks, weights, penalties", "gates, exempt tokens"],
)
def test_the_loss_and_its_backward_wait_for_nothing(methods):
    waits = of_a_part(*methods)
    assert waits.seen.keys() == {"plan"}


@pytest.mark.parametrize(
    ("methods", "most"),
    [
        ((ClipHigher(),), {"plan": 26, "loss": 51, "backward": 8}),
        ((ClipHigher(), S2TMask(), STARE()), {"plan": 83, "loss": 53, "backward": 8}),
        ((ClipHigher(dual_clip=3.0), S2TMask(), STARE()), {"plan": 83, "loss": 59, "backward": 8}),
    ],
    ids=["clip", "clip, S2T, STARE", "dual clip, S2T, STARE"],
)
def test_launches_of_a_part(methods, most):
    """No more than today; a larger number needs a reason: six in a loss count log-probs above 0."""
    launches = of_a_part(*methods).launches
    assert launches.keys() == most.keys()
    assert {phase: count for phase, count in launches.items() if count > most[phase]} == {}


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
    waits = Waits()
    with waits():
        look(values)
    assert waits.seen == {"": Counter({f"test_device_reads.py <lambda>: {what}": 1})}


def test_what_stays_with_the_host_or_on_the_device_is_no_wait_and_views_launch_nothing():
    values = torch.ones(4)
    waits = Waits()
    with waits():
        assert float(torch.tensor([1.0, 2.0]).sum()) == 3
        assert torch.arange(3)[torch.arange(3) > 0].tolist() == [1, 2]
        waits.phase = "views"
        (values.view(2, 2)[0].unsqueeze(1).expand(2, 3).t() + 1).mul_(2).detach()
    assert waits.seen == {}
    assert waits.launches["views"] == 2
