"""Laws of agreement: one optimizer step told in two ways gives one outcome.

In parts or whole, in another order, beside other methods, twice, in other padding: none of it is in the data.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from rlstab.core.batch import TokenBatch, layout_of
from rlstab.core.comm import LocalComm
from rlstab.core.compose import compose
from rlstab.core.objective import TokenObjective
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Pool, settle
from rlstab.testing import tolerances
from rlstab.testing.agreement import BrokenLaw, close, near, same_state, same_summary
from rlstab.testing.law import Case, Doubling, Dropping, NotHere, methods_of
from rlstab.testing.outcome import Outcome, joined, run_ranks, run_whole


def split(method: TokenObjective, case: Case) -> None:
    """Any cut into 1 to 12 parts over 1 to 3 ranks, empty parts and ranks among them, over two steps with state."""
    rng = random.Random(case.seed)
    world = case.processes.count if case.processes else rng.randint(1, 3)
    over = case.processes.run_ranks if case.processes else run_ranks
    whole = ranked = None
    for number, step in enumerate((case.first, case.second)):
        rows = list(range(len(step.sequence_ids)))
        rng.shuffle(rows)
        parts: list[list[int]] = [[] for _ in range(rng.randint(1, 12))]
        for row in rows:
            rng.choice(parts).append(row)
        ranks: list[list[list[int]]] = [[] for _ in range(world)]
        for part in parts:  # in the second optimizer step one of several ranks has none
            rng.choice(ranks[number:] or ranks).append(part)
        rng.shuffle(ranks)
        whole = run_whole(method, step, whole.state if whole else None)
        found = over(method, step, ranks, ranked.state if ranked else None)
        ranked = joined(found)
        where = f"step {number + 1} in {len(parts)} parts over {world} ranks"
        close(where, whole, ranked, tolerances.REORDERED)
        for rank, one in enumerate(found):
            same_state(f"{where}, rank 0 and rank {rank}: the state", ranked.state, one.state, 0.0)
            near(f"{where}, rank 0 and rank {rank}: lr_scale", ranked.lr_scale, one.lr_scale, 0.0)


def permutation(method: TokenObjective, case: Case) -> None:
    """Tokens and sequences in another order: the same loss, gradients permuted."""
    moved, order = case.first.shuffled(case.seed)
    one, other = run_whole(method, case.first), run_whole(method, moved)
    one.gradients = {name: gradient[order] for name, gradient in one.gradients.items()}
    close("in another order of tokens and sequences", one, other, tolerances.REORDERED)


def order_free(method: TokenObjective, case: Case) -> None:
    """Listed first, between others or last in a composition: the same, bit for bit."""
    before, after = Doubling(), Dropping()
    orders = ((method, before, after), (before, method, after), (before, after, method))
    outcomes = [run_whole(compose(*order), case.first) for order in orders]
    for other in outcomes[1:]:
        close("listed elsewhere in a composition", outcomes[0], other, 0.0)


def replication(method: TokenObjective, case: Case) -> None:
    """Every sequence twice: the same loss and metrics, half the gradient each."""
    with torch.no_grad():
        measured = [one for leaf in methods_of(method) for one in _measured(leaf, case.first.batch())]
        if any(isinstance(one, Pool) for several in measured for one in several.values()):
            raise NotHere("it selects by an order statistic")
    one, double = run_whole(method, case.first), run_whole(method, case.first.twice())
    for name, gradient in double.gradients.items():
        double.gradients[name] = gradient.view(2, -1).sum(0)
    close("with every sequence twice", one, double, tolerances.REORDERED)


def packed(method: TokenObjective, case: Case) -> None:
    """The content and amount of padding change nothing, bit for bit."""
    outcomes = []
    for fill, extra in ((0.0, 0), (1e9, 3), (math.nan, 1), (-math.inf, 5)):
        batch, policy, leaves = case.first.padded(fill, extra)
        plan = make_plan(method, [batch])
        out = plan.loss(batch, policy)
        out.loss.backward()
        gradients = {}
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradients[name] = leaf.grad.reshape(-1)[layout_of(batch).index]
                if not torch.equal(leaf.grad.count_nonzero(), gradients[name].count_nonzero()):
                    raise BrokenLaw(f"padding got a gradient of '{name}'.")
        outcomes.append(Outcome(out.loss.item(), gradients, dict(out.report), plan.state, plan.lr_scale))
    for other in outcomes[1:]:
        close("with other padding", outcomes[0], other, 0.0)


def live_rows(method: TokenObjective, case: Case) -> None:
    """Off the rows that a plan names, live outputs may hold anything finite; nothing there gets a gradient."""
    step = case.first
    batch = step.batch()
    objective = compose(method, Dropping())
    plan = make_plan(objective, [batch])
    rows, outcomes = plan.live_rows(0), []
    for noise in (None, 0.7, -1.9):
        leaves = step.leaves()
        given = {
            name: one if noise is None or name not in rows else torch.where(rows[name], one, one.detach() + noise)
            for name, one in leaves.items()
        }
        out = plan.loss(0, PolicyOutputs(**given))
        out.loss.backward()
        gradients = {}
        for name, leaf in leaves.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if bool((gradient[~rows[name]] != 0).any() if name in rows else (gradient != 0).any()):
                raise BrokenLaw(f"the live '{name}' has a gradient outside `plan.live_rows`.")
            gradients[name] = gradient
        outcomes.append(Outcome(out.loss.item(), gradients, dict(out.report), plan.state, plan.lr_scale))
    for other in outcomes[1:]:
        close("with other live outputs outside `plan.live_rows`", outcomes[0], other, 0.0)


def monoid(method: TokenObjective, case: Case) -> None:
    """Statistics merge in any order and grouping, and those of an empty batch change nothing."""
    for leaf in methods_of(method):
        with torch.no_grad():
            parts = TokenBatch.empty(leaf.needs), case.first.batch(), case.second.batch()
            nothing, one, two = _measured(leaf, *parts)
        if not nothing.keys() == one.keys() == two.keys():
            raise BrokenLaw(f"`measure` names {sorted(one)} on tokens and {sorted(nothing)} on none.")
        for name in one:
            a, b, empty = one[name], two[name], nothing[name]
            same_summary(f"{name}, merged in another order", _merge(a, b), _merge(b, a))
            same_summary(f"{name}, grouped otherwise", _merge(_merge(a, b), a), _merge(a, _merge(b, a)))
            same_summary(f"{name}, with an empty batch", _merge(a, empty), a)


def _measured(leaf: TokenObjective, *parts: TokenBatch) -> list[dict[str, Any]]:
    """Both rounds of measuring on the parts of one optimizer step: the second sees the first over all of them."""
    first = [dict(leaf.measure(part)) for part in parts]
    if any(one.keys() != first[0].keys() for one in first):
        return first
    stat = settle(first, LocalComm())
    return [{**one, **leaf.measure_again(part, stat)} for one, part in zip(first, parts, strict=True)]


def _merge(one: Any, other: Any) -> Any:
    return one.merge(other)
