"""A plan by number, for a host that builds its batches anew; and the state of a composition that is called."""

import pytest
import torch

from rlstab import (
    CPPO,
    STARE,
    AdaptiveEntropy,
    ClipHigher,
    LpReg,
    S2TMask,
    TokenBatch,
    TopEntropyMask,
    compose,
    make_plan,
)
from rlstab.errors import OutOfRange
from tests.core.methods import CappedGate, PassRate, Scale
from tests.core.steps import batch_of, gradients, live_of, random_rows

ROWS = random_rows(11, [3, 5, 0, 7, 4, 6])
PARTS = [[0, 3], [1, 2], [5, 4]]
OBJECTIVE = compose(
    ClipHigher(), CappedGate(), CPPO(), S2TMask(), LpReg(share=0.4), PassRate(), STARE(target_entropy=0.8)
)


def pieces():
    """The parts as new objects: batches, live outputs and their leaves."""
    for part in PARTS:
        rows = [ROWS[row] for row in part]
        batch = batch_of(rows, part)
        yield batch, *live_of(batch, rows)


def test_a_host_that_rebuilds_its_batches_names_the_number():
    planned = list(pieces())
    batches = [batch for batch, _, _ in planned]
    plan, twin = make_plan(OBJECTIVE, batches), make_plan(OBJECTIVE, iter(batches))
    assert (len(twin.parts), twin.everything.tokens) == (3, 25)
    for number, (old, new) in enumerate(zip(planned, pieces(), strict=True)):
        (batch, policy, leaves), (rebuilt, again, others) = old, new
        assert rebuilt is not batch
        by_batch, by_number = twin.loss(batch, policy), plan.loss(number, again)
        by_batch.loss.backward()
        by_number.loss.backward()
        assert torch.equal(by_number.loss, by_batch.loss)
        assert by_number.metrics() == by_batch.metrics()
        for field, slopes in gradients(batch, leaves).items():
            assert torch.equal(gradients(rebuilt, others)[field], slopes)
        assert plan.terms(number) is plan.terms(batch)
        assert plan.part(number).batch is batch
        with pytest.raises(OutOfRange):
            plan.loss(rebuilt, again)


def test_pieces_cut_after_planning_sum_to_the_whole():
    """Other cuts than the parts that were measured: the loss and its gradient are those of the parts."""
    plan = make_plan(OBJECTIVE, [batch for batch, _, _ in pieces()])
    numbers = {tuple(rows): number for number, rows in enumerate(PARTS)}
    loss, slopes = summed([step_of(rows, plan, numbers[rows]) for rows in numbers])
    for cut in ([[0, 1, 2, 3, 4, 5]], [[5], [4, 3], [2], [0, 1]], [[4, 2], [5, 1, 3, 0]]):
        cut_loss, cut_slopes = summed([step_of(rows, plan) for rows in cut])
        assert cut_loss == pytest.approx(loss, rel=1e-12)
        assert cut_slopes == pytest.approx(slopes, rel=1e-9, abs=1e-15)


def summed(steps):
    return sum(loss for loss, _ in steps), {place: slope for _, part in steps for place, slope in part.items()}


def step_of(rows, plan, number=None):
    """The loss, and the gradients by field, row and place, of some rows: a part by its number, or a piece."""
    batch = batch_of([ROWS[row] for row in rows], rows)
    policy, leaves = live_of(batch, [ROWS[row] for row in rows])
    part = plan.piece(batch) if number is None else plan.part(number)
    assert plan.part(part) is part
    assert plan.terms(part) is part.terms
    assert plan.live_rows(part).keys() >= {"logprobs"}
    out = plan.loss(part, policy)
    out.loss.backward()
    slopes = {
        (name, row, place): slope
        for name, leaf in leaves.items()
        if leaf.grad is not None
        for number, row in enumerate(rows)
        for place, slope in enumerate(leaf.grad[number, : len(ROWS[row])].tolist())
    }
    return out.loss.item(), slopes


def test_the_scale_of_the_learning_rate_is_handed_out():
    objective = compose(Scale(lr=0.5), Scale(lr=0.25), S2TMask())
    batch, policy, _ = next(pieces())
    plan = make_plan(objective, [batch])
    assert plan.loss(0, policy).lr_scale == plan.lr_scale == 0.125
    assert objective(batch, policy, state=objective.init_state()).lr_scale == 0.125
    assert compose(S2TMask())(batch, policy).lr_scale == 1.0


class Asked:
    """A rank among others, which have nothing; counts what it is asked for."""

    def __init__(self):
        self.calls = 0

    def sum(self, values):
        self.calls += 1
        return values.clone()

    gather = sum


def test_methods_share_the_rounds_in_which_they_ask_other_ranks():
    """Of more values than are gathered: no more rounds than the method alone that has the most."""
    draw = torch.Generator().manual_seed(0)
    uniform = torch.rand(120, 100, generator=draw)
    batch = TokenBatch.from_padded(
        response_mask=torch.ones(120, 100),
        advantages=torch.randn(120, generator=draw),
        old_logprobs=-5 * uniform,
        entropies=2 * torch.rand(120, 100, generator=draw),
    )

    def rounds(*methods):
        comm = Asked()
        make_plan(compose(*methods), [batch], comm=comm)
        return comm.calls

    several = [TopEntropyMask(), STARE(), AdaptiveEntropy(), ClipHigher()]
    alone = [rounds(method) for method in several]
    assert rounds(*several) == max(alone) > min(alone)
