"""The laws: what every method obeys, each a check on a drawn case that raises ``BrokenLaw`` with what it saw."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlstab.core.batch import SIGNALS, TokenBatch
from rlstab.core.comm import LocalComm
from rlstab.core.compose import compose, within
from rlstab.core.contract import BASICS
from rlstab.core.loss import loss_of_part
from rlstab.core.objective import State, TokenObjective
from rlstab.core.observe import observe
from rlstab.core.plan import Plan, make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean, Pool, Settled, settle
from rlstab.core.terms import Bounds, Penalty, Terms
from rlstab.core.walk import walk
from rlstab.testing import tolerances
from rlstab.testing.agreement import BrokenLaw, close, near, same_state, same_summary
from rlstab.testing.outcome import Outcome, joined, run_ranks, run_whole
from rlstab.testing.rank_processes import Processes
from rlstab.testing.steps import Step


class NotHere(Exception):
    """A law has nothing to say about this method; the text says why."""


@dataclass(frozen=True)
class Case:
    """What a law is checked on: two optimizer steps in a row, a seed, and processes for ranks or threads.

    The second step is the first again where the law looks at one step only.
    """

    first: Step
    second: Step
    seed: int
    processes: Processes | None = None


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes:
        name: by which an exception is declared: ``exceptions = {"replication": "why"}`` on the class.
        says: one sentence.
        check: raises :class:`BrokenLaw`, or :class:`NotHere`.
        extreme: it is checked on extreme steps.
        ranks: it runs a step over ranks, which can be real processes.
        second: it looks at two different steps; drawing the second takes time.
    """

    name: str
    says: str
    check: Callable[[TokenObjective, Case], None]
    extreme: bool = False
    ranks: bool = False
    second: bool = False


# -- the laws ----------------------------------------------------------------------------------------------------------


def finite(method: TokenObjective, case: Case) -> None:
    """Extreme log-probs, ratios and entropies."""
    outcome = run_whole(method, case.first)
    numbers = {"the loss": outcome.loss, "lr_scale": outcome.lr_scale}
    numbers |= {f"the metric '{name}'": one.value for name, one in outcome.report.items() if float(one.count)}
    numbers |= {f"state {place}": float(one) for place, one in _leaves(outcome.state) if isinstance(one, int | float)}
    for name, gradient in outcome.gradients.items():
        numbers[f"the gradient of '{name}'"] = float(gradient.abs().max()) if gradient.numel() else 0.0
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise BrokenLaw(f"{name} is {value}.")


def pure(method: TokenObjective, case: Case) -> None:
    """No input changes, no global random number is drawn, the same call gives the same."""
    batch = case.first.batch()
    before = {name: values.clone() for name, values in _tensors_of(batch)}
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    state = method.init_state()
    remembered = repr(sorted(_leaves(state), key=repr))
    plan = make_plan(method, [batch], state)
    plan.loss(batch, PolicyOutputs(**case.first.leaves()))
    for name, values in _tensors_of(batch):
        if not torch.equal(values, before[name]):
            raise BrokenLaw(f"it changed '{name}' of the batch in place.")
    if repr(sorted(_leaves(state), key=repr)) != remembered:
        raise BrokenLaw("it changed the state that it was given in place; `advance` returns a new one.")
    if not torch.equal(torch_state, torch.get_rng_state()) or python_state != random.getstate():
        raise BrokenLaw("it drew from a global random number generator; use batch.uniform(seed).")
    one, other = run_whole(method, case.first), run_whole(method, case.first)
    close("called twice with the same", one, other, 0.0)


def detached(method: TokenObjective, case: Case) -> None:
    """No tensor in terms, statistics or state requires grad."""
    plan = make_plan(method, [batch := case.first.batch()])
    for place, one in [*_leaves(plan.terms(batch)), *_leaves(plan.state)]:
        if isinstance(one, Tensor) and one.requires_grad:
            raise BrokenLaw(f"{place} requires grad; gradients live only in the functions of Terms.")


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
    before, after = _Doubling(), _Dropping()
    orders = ((method, before, after), (before, method, after), (before, after, method))
    outcomes = [run_whole(compose(*order), case.first) for order in orders]
    for other in outcomes[1:]:
        close("listed elsewhere in a composition", outcomes[0], other, 0.0)


def replication(method: TokenObjective, case: Case) -> None:
    """Every sequence twice: the same loss and metrics, half the gradient each."""
    with torch.no_grad():
        measured = [one for leaf in _methods(method) for one in _measured(leaf, case.first.batch())]
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
                assert batch.index is not None
                gradients[name] = leaf.grad.reshape(-1)[batch.index]
                if not torch.equal(leaf.grad.count_nonzero(), gradients[name].count_nonzero()):
                    raise BrokenLaw(f"padding got a gradient of '{name}'.")
        outcomes.append(Outcome(out.loss.item(), gradients, dict(out.report), plan.state, plan.lr_scale))
    for other in outcomes[1:]:
        close("with other padding", outcomes[0], other, 0.0)


def live_rows(method: TokenObjective, case: Case) -> None:
    """Off the rows that a plan names, live outputs may hold anything finite; nothing there gets a gradient."""
    step = case.first
    batch = step.batch()
    objective = compose(method, _Dropping())
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


def masked(method: TokenObjective, case: Case) -> None:
    """Tokens that were dropped have a policy gradient of exactly zero."""
    step, mask = case.first, _Dropping()
    batch = step.batch()
    objective = compose(method, mask)
    dropped = ~mask.chosen(batch)
    plan = make_plan(objective, [batch])
    keep = plan.terms(batch).keep
    assert keep is not None
    leaves = step.leaves()
    _policy_part(plan, leaves)
    gradient = leaves["logprobs"].grad
    if gradient is not None and bool((gradient[~keep | dropped] != 0).any()):
        raise BrokenLaw("a dropped token has a policy gradient: the ratio of a kept token reads it.")


def gradcheck(method: TokenObjective, case: Case) -> None:
    """The gradient is that of finite differences in float64, the anchor held fixed."""
    step = case.first
    batch = step.batch()
    plan = make_plan(method, [batch])
    anchor = PolicyOutputs(**step.live)
    names = sorted(step.live)

    def loss(*values: Tensor) -> Tensor:
        return plan.loss(batch, PolicyOutputs(**dict(zip(names, values, strict=True))), anchor=anchor).loss

    if _near_a_kink(plan.terms(batch), batch, step):
        return
    inputs = [step.live[name].clone().requires_grad_() for name in names]
    try:
        torch.autograd.gradcheck(
            loss,
            inputs,
            eps=tolerances.GRADCHECK_STEP,
            atol=tolerances.GRADCHECK_ABSOLUTE,
            rtol=tolerances.GRADCHECK_RELATIVE,
        )
    except RuntimeError as error:
        raise BrokenLaw(f"finite differences disagree: {str(error).splitlines()[0]}") from error


def zero_advantage(method: TokenObjective, case: Case) -> None:
    """Without advantage the policy term has no gradient."""
    step = case.first.without_advantage()
    batch, leaves = step.batch(), step.leaves()
    plan = make_plan(method, [batch])
    _policy_part(plan, leaves)
    gradient = leaves["logprobs"].grad
    if gradient is not None and bool((gradient != 0).any()):
        raise BrokenLaw("all advantages are 0 and the policy term still has a gradient.")


def declared(method: TokenObjective, case: Case) -> None:
    """It reads what ``needs``, ``reads_policies`` and ``live_needs`` name; ``writes`` is checked at every call."""
    without = sorted((SIGNALS.keys() | set(case.first.evidence)) - method.needs - _ALWAYS)
    batch = case.first.batch(without=without)
    try:
        plan = make_plan(method, [batch])
        policy = PolicyOutputs(
            case.first.live["logprobs"],
            case.first.live["entropies"] if "entropies" in method.live_needs else None,
            case.first.live["log_kept_mass"] if "log_kept_mass" in method.live_needs else None,
        )
        with torch.no_grad():
            bare = plan.loss(batch, policy).loss.item()
    except LookupError as error:
        raise BrokenLaw(f"it reads what it does not declare: {error}") from error
    near("the loss without, and with, signals that it does not declare", bare, run_whole(method, case.first).loss, 0.0)
    _check_reads(method, case.first)
    undifferentiated = plan.live_rows(batch).keys() - method.live_needs - {"logprobs"}
    if undifferentiated:
        raise BrokenLaw(f"a penalty reads the live {sorted(undifferentiated)}, which `live_needs` does not name.")


def monoid(method: TokenObjective, case: Case) -> None:
    """Statistics merge in any order and grouping, and those of an empty batch change nothing."""
    for leaf in _methods(method):
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


def serialises(method: TokenObjective, case: Case) -> None:
    """``repr`` and YAML give an equal method, the state survives JSON, and the run continues as it would have."""
    classes = {type(leaf).__name__: type(leaf) for leaf in _methods(method)}
    text = repr(method)
    for cls in classes.values():  # a class made inside a function calls itself by a path that is no Python
        text = text.replace(f"{cls.__qualname__}(", f"{cls.__name__}(")
    if eval(text, {**classes, "compose": compose, "within": within, "observe": observe}) != method:
        raise BrokenLaw(f"its repr does not give it back: {method!r}.")
    first = run_whole(method, case.first)
    for place, one in _leaves(first.state):
        if not isinstance(one, bool | int | float | str | Tensor) and one is not None:
            raise BrokenLaw(f"{place} is a {type(one).__name__}; a state holds numbers, bools and tensors.")
    back = _from_plain(json.loads(json.dumps(_plain(first.state))))
    close("resumed", run_whole(method, case.second, first.state), run_whole(method, case.second, back), 0.0)


def precision(method: TokenObjective, case: Case) -> None:
    """float32 and bfloat16 inputs give what float64 gives on the same numbers."""
    for dtype in (torch.float32, torch.bfloat16):
        rounded = case.first.cast(dtype)
        exact = Step(
            {name: values.double() for name, values in rounded.evidence.items()},
            {name: values.double() for name, values in rounded.live.items()},
            rounded.sequence,
            rounded.position,
            rounded.sequence_ids,
            rounded.group_ids,
        )
        narrow, wide = run_whole(method, rounded), run_whole(method, exact)
        narrow.gradients = {name: gradient.double() for name, gradient in narrow.gradients.items()}
        close(f"in {str(dtype).removeprefix('torch.')}", narrow, wide, tolerances.SINGLE)


def limits(method: TokenObjective, case: Case) -> None:
    """Each method is the identity at each of its limits given by settings, whatever its other settings are."""
    limited = [one.at(leaf.method) for leaf in walk(method) for one in leaf.method.limits if one.settings is not None]
    if not limited:
        raise NotHere("it declares no settings at which it is the identity")
    base = run_whole(compose(), case.first)
    for other in limited:
        outcome = run_whole(other, case.first)
        outcome.report, outcome.state = base.report, base.state
        close(f"{other!r} against no method", base, outcome, 0.0)


LAWS: tuple[Law, ...] = (
    Law("finite", "finite on extreme inputs", finite, extreme=True),
    Law("pure", "inputs unchanged, no global randomness, same call same result", pure),
    Law("detached", "no tensor in terms or state requires grad", detached),
    Law(
        "split",
        "any cut into parts and ranks: same loss, gradient, metrics, next state",
        split,
        ranks=True,
        second=True,
    ),
    Law("permutation", "any order of tokens and sequences", permutation),
    Law("order-free", "listed anywhere in a composition, bit for bit", order_free),
    Law("replication", "the batch twice: the same loss", replication),
    Law("packed", "content and amount of padding do not matter, bit for bit", packed),
    Law("masked", "dropped tokens have exactly no policy gradient", masked),
    Law("gradcheck", "the gradient is that of finite differences, anchor fixed", gradcheck),
    Law("live rows", "live outputs outside the rows that a plan names do not matter", live_rows),
    Law("zero advantage", "no advantage, no policy gradient", zero_advantage),
    Law("declared", "reads `needs`, `reads_policies` and `live_needs`, and nothing else", declared),
    Law("monoid", "statistics merge in any order; empty ones change nothing", monoid, second=True),
    Law("serialises", "repr and state survive, and the run goes on", serialises, second=True),
    Law("precision", "float32 and bfloat16 within a bound of float64", precision),
    Law("limits", "the identity at its `limits`, bit for bit", limits),
)

_ALWAYS = frozenset({"old_logprobs", "logprobs", "advantages"})


# -- helpers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Doubling(TokenObjective):
    name = "law_partner_doubling"
    writes = frozenset({"weight"})

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=1.0 + 0.1 * (batch.position % 3).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class _Dropping(TokenObjective):
    name = "law_partner_dropping"
    writes = frozenset({"keep"})

    def chosen(self, batch: TokenBatch) -> Tensor:
        return batch.uniform(3) < 0.6

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(keep=self.chosen(batch))


def _check_reads(method: TokenObjective, step: Step) -> None:
    """Log-probs that a method does not read, and under a live ratio their old values, may be anything."""
    for name in sorted(set(BASICS) - method.reads_policies):
        batch = replace(step.batch(), live_ratio=True)
        other = replace(batch, **{name: getattr(batch, name).flip(0) - 0.5})
        outcomes = []
        for one in (batch, other):
            leaves = step.leaves()
            plan = make_plan(method, [one])
            out = plan.loss(0, PolicyOutputs(**leaves))
            out.loss.backward()
            gradients = {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}
            outcomes.append(Outcome(out.loss.item(), gradients, dict(out.report), plan.state, plan.lr_scale))
        close(f"with another '{name}', which its `reads_policies` does not name", outcomes[0], outcomes[1], 0.0)


def _measured(leaf: TokenObjective, *parts: TokenBatch) -> list[dict[str, Any]]:
    """Both rounds of measuring on the parts of one optimizer step: the second sees the first over all of them."""
    first = [dict(leaf.measure(part)) for part in parts]
    if any(one.keys() != first[0].keys() for one in first):
        return first
    stat = settle(first, LocalComm())
    return [{**one, **leaf.measure_again(part, stat)} for one, part in zip(first, parts, strict=True)]


def _methods(objective: TokenObjective) -> list[TokenObjective]:
    """The methods inside, those that are only observed too."""
    return [leaf.method for leaf in walk(objective, observed=True)]


def _policy_part(plan: Plan, leaves: dict[str, Tensor]) -> None:
    """Backward through the policy term of the only part alone."""
    part = plan.part(0)
    bare = replace(part, terms=replace(part.terms, penalties={}))
    loss_of_part(bare, PolicyOutputs(**leaves), None, plan.kept, plan.everything).loss.backward()


def _near_a_kink(terms: Terms, batch: TokenBatch, step: Step) -> bool:
    """A ratio within one finite-difference step of a bound, or of the clamp: there the derivative jumps."""
    ratio = (step.live["logprobs"] - batch.old_logprobs).exp()
    edges: list[Any] = []
    if terms.bounds is not None:
        edges += [1 - terms.bounds.low, 1 + terms.bounds.high]
        edges += [] if terms.bounds.dual is None else [terms.bounds.dual]
    return any(bool(((ratio - edge).abs() < 1e-4).any()) for edge in edges)


def _tensors_of(batch: TokenBatch) -> list[tuple[str, Tensor]]:
    named = [(one.name, getattr(batch, one.name)) for one in fields(batch)]
    return [(name, one) for name, one in named if isinstance(one, Tensor)] + sorted(batch.extra.items())


def _leaves(data: Any, place: str = "state") -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping):
        for key, one in data.items():
            yield from _leaves(one, f"{place}['{key}']")
    elif isinstance(data, Terms | Penalty | Bounds | Mean) or (is_dataclass(data) and not isinstance(data, type)):
        for one in fields(data):
            yield from _leaves(getattr(data, one.name), f"{type(data).__name__}.{one.name}")
    else:
        yield place, data


def _plain(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _plain(one) for key, one in state.items()}
    return {"tensor": state.tolist(), "dtype": str(state.dtype)} if isinstance(state, Tensor) else state


def _from_plain(plain: Any) -> Any:
    if isinstance(plain, dict):
        if plain.keys() == {"tensor", "dtype"}:
            return torch.tensor(plain["tensor"], dtype=getattr(torch, plain["dtype"].removeprefix("torch.")))
        return {key: _from_plain(one) for key, one in plain.items()}
    return plain


def _merge(one: Any, other: Any) -> Any:
    return one.merge(other)
