"""The laws of methods, each a check on random optimizer steps that raises ``BrokenLaw`` with its finding.

Purity: an outcome depends only on what a method declares that it reads. Agreement: one optimizer
step given in two ways has one outcome. The loss: numbers are finite, a gradient is a slope, and no token pulls that
must not.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from rlstab.core.batch import BASICS, MARKS, SIGNALS, TokenBatch
from rlstab.core.comm import LocalComm
from rlstab.core.compose import compose, observe, walk, within
from rlstab.core.loss import loss_of_part
from rlstab.core.method import Method, measure_all
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import Plan, make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled, Threshold
from rlstab.core.terms import Terms
from rlstab.testing import tolerances
from rlstab.testing.compare import (
    BrokenLaw,
    check_bounded,
    check_slopes,
    check_state,
    close,
    leaves_of,
    near,
    same_state,
    size_of,
)
from rlstab.testing.edges import edges_of, rich_step, with_small, words_of
from rlstab.testing.fresh_process import PickledMethod, Unreachable, methods_of
from rlstab.testing.relabel import relabellings, same_draws
from rlstab.testing.run import RunOutcome, StepOutcome, joined, run_chain, run_ranks, run_whole
from rlstab.testing.steps import Step, in_domain, large_step, make_step
from rlstab.testing.watch import ReadOnly, Shared, Wide

#: Raises :class:`BrokenLaw`, or :class:`NotApplicable`.
LawCheck: TypeAlias = Callable[[Any, Any], None]
#: Runs a method or stage; requires that two outcomes are the same within a tolerance.
_Run: TypeAlias = Callable[..., Any]


#: Numbers of optimizer steps or rollouts in a long run, and after it with only the state advancing.
LONG, LONGER = 30, 100


class NotApplicable(Exception):
    """A law does not apply to this method; the text says why."""


@dataclass(frozen=True)
class Trial:
    """A trial of a law of methods: two optimizer steps in a row, and a seed.

    Attributes:
        first, second: the optimizer steps.
        seed: of cuts and orders; batches are in padded rows if it is odd, and packed if it is even.
        pickled: the method for another process, as it was before any law saw it.
    """

    first: Step
    second: Step
    seed: int
    pickled: PickledMethod
    _whole: dict[int, StepOutcome] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return repr(self.first)

    def whole(self, method: TokenObjective) -> StepOutcome:
        """The first optimizer step in one packed batch; run once for all laws."""
        if id(method) not in self._whole:
            self._whole[id(method)] = run_whole(method, self.first)
        known = self._whole[id(method)]
        return replace(known, gradients=dict(known.gradients), report=dict(known.report))

    def may_refuse(self, method: TokenObjective) -> bool:
        """Whether raising ``OutOfRange`` is allowed here."""
        return False

    def laid_out(self, step: Step) -> Step:
        """An optimizer step, in padded rows if the seed is odd."""
        return step.laid_out(self.seed) if self.seed % 2 else step


@dataclass(frozen=True)
class Law:
    """One law, of methods or of stages.

    Attributes:
        name: of the law, by which an exception is declared.
        says: one sentence.
        check: of a method or stage, on a trial.
        draws: the kind of trials. ``sharp`` steps have ties, ratios far from 1, and values on the thresholds of the
            method; ``smooth`` ones lack values on thresholds; ``extreme`` ones go as far as numbers can go.
        once: whether it is checked only once.
        large: whether it is also checked on a large trial.
    """

    name: str
    says: str
    check: LawCheck
    draws: Literal["sharp", "smooth", "extreme"] = "sharp"
    once: bool = False
    large: bool = False


def add_to(laws: list[Law], **options: Any) -> Callable[[Any], Any]:
    """A decorator that makes a check the next of these laws, with the name and docstring of the function."""

    def add(check: Any) -> Any:
        laws.append(Law(check.__name__.replace("_", " "), str(check.__doc__).rstrip("."), check, **options))
        return check

    return add


#: The laws of methods, in the order of the report. If the first is broken, no other one is checked.
LAWS: list[Law] = []
law = partial(add_to, LAWS)


class Doubling(TokenObjective):
    """A partner that writes weights."""

    name = "law_partner_doubling"
    writes = {"weight"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=1.0 + 0.1 * (batch.position % 3).to(batch.logprobs.dtype))


class Dropping(TokenObjective):
    """A partner that drops tokens."""

    name = "law_partner_dropping"
    writes = {"keep"}

    def chosen(self, batch: TokenBatch) -> Tensor:
        return batch.uniform(3) < 0.6

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(keep=self.chosen(batch))


def dealt(rng: random.Random, items: Iterable[int], parts: int, world: int, spared: int) -> list[list[list[int]]]:
    """Sequences or groups dealt out to parts, and parts to ranks; of several ranks the first ``spared`` get nothing."""
    cut: list[list[int]] = [[] for _ in range(parts)]
    for item in items:
        rng.choice(cut).append(item)
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    for part in cut:
        rng.choice(ranks[spared:] or ranks).append(part)
    rng.shuffle(ranks)
    return ranks


def check_finite(outcome: RunOutcome, given: Iterable[tuple[str, Any]], where: str = "") -> None:
    """Require that an outcome, its metrics and its state are finite numbers.

    Raises:
        BrokenLaw: names the first that is not.
    """
    metrics = ((f"the metric '{name}'", mean.value) for name, mean in outcome.report.items() if float(mean.count))
    for name, value in (*given, *metrics, *leaves_of(outcome.state)):
        values = torch.as_tensor(value).detach() if isinstance(value, int | float | Tensor) else torch.zeros(0)
        if not bool(values.isfinite().all()):
            raise BrokenLaw(
                f"{name} is {float(values[~values.isfinite()].flatten()[0])}{where}. Clamp a log before `exp`, and "
                f"define the value of an empty set."
            )


def check_repr(method: Method[Any]) -> None:
    """``repr`` gives an equal method or stage.

    Raises:
        BrokenLaw: it does not.
    """
    text: str = repr(method)
    names: dict[str, Any] = {"compose": compose, "within": within, "observe": observe}
    for cls in map(type, methods_of(method)):  # the qualified name of one made inside a function cannot be evaluated
        text, names[cls.__name__] = text.replace(f"{cls.__qualname__}(", f"{cls.__name__}("), cls
    if eval(text, names) != method:
        raise BrokenLaw(f"its repr does not give it back: {method!r}.")


def check_process(method: Method[Any], trial: Any, run: _Run, chain: Sequence[Any], same: _Run) -> None:
    """Require that a chain of optimizer steps or rollouts gives the same in a fresh process as here.

    Raises:
        BrokenLaw: it does not.
        NotApplicable: no other process can run the method.
    """
    here = run(method, chain)
    try:
        there = trial.pickled.run(run, chain)
    except Unreachable as reason:
        raise NotApplicable(f"not checked, since another process cannot run it: {reason}.") from reason
    for number, (mine, theirs) in enumerate(zip(here, there, strict=True), start=1):
        try:
            same(f"number {number} here, and as the first that another process sees", mine, theirs, 0.0)
        except BrokenLaw as error:
            raise BrokenLaw(
                f"{error} Something outlives a call, or belongs to the process: a variable, a cache, hash() of a text, "
                f"a rank, a clock. What lasts belongs in the state; random numbers come from batch.uniform(seed)."
            ) from error


def check_long_run(
    method: Method[Any], chain: Sequence[Any], parts_of: Callable[[Any], Any], whole: _Run, parts: _Run, same: _Run
) -> None:
    """Require that each step or rollout is the same whole and in parts, with a new state of the same kind and size.

    Raises:
        BrokenLaw: it does not.
        NotApplicable: the method has no state.
    """
    if not method.init_state():
        raise NotApplicable("it has no state")
    state = initial = method.init_state()
    sizes = []
    for number, given in enumerate(chain, start=1):
        with untouched_state(state):
            outcome, joint = whole(method, given, state), parts(method, given, state)
        same(f"number {number} of a long run, whole and in parts over 2 ranks", outcome, joint, tolerances.REORDERED)
        check_state(outcome.state, initial)
        state = outcome.state
        sizes.append(size_of(state))
    for number in range(LONGER):
        state = measure_all(method, [parts_of(chain[number % len(chain)])], state, LocalComm())[1]
        sizes.append(size_of(state))
    check_state(state, initial)
    check_bounded(sizes)


@contextmanager
def untouched_state(state: State) -> Iterator[None]:
    """A context in which nothing may change the state."""
    before = copy.deepcopy(dict(state))
    yield
    try:
        same_state("the state before and after", before, state, 0.0)
    except BrokenLaw:
        raise BrokenLaw("it changed the state that it was given in place; `advance` returns a new one.") from None


@contextmanager
def untouched(state: State, batch: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[ReadOnly]:
    """A context in which nothing may write to these tensors, add to the batch, or use what the process shares."""
    guard, known = ReadOnly(), _attributes(batch)
    guard.guard(tensors)
    guard.guard((path, value) for path, value in leaves_of(state) if isinstance(value, Tensor))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2**40 + 1)  # also detects a method that sets its own seed again
        shared = Shared()
        with untouched_state(state):
            yield guard
        guard.check()
        shared.check()
    if _attributes(batch) != known:
        raise BrokenLaw("it put something on the batch, which belongs to others. What lasts belongs in the state.")


def _outcome(plan: Plan, leaves: Mapping[str, Tensor], policy: PolicyOutputs | None = None) -> StepOutcome:
    """The loss of the only part, with its gradients."""
    out = plan.loss(0, policy or PolicyOutputs(**leaves))
    out.loss.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return StepOutcome(out.loss.item(), gradients, plan.lr_scale, report=dict(out.report), state=plan.state)


def _policy_gradient(plan: Plan, step: Step) -> Tensor:
    """The gradient of the live log-probs through the policy term of the only part."""
    leaves = step.leaves()
    bare = replace(plan.part(0), terms=replace(plan.part(0).terms, penalties={}))
    loss_of_part(bare, PolicyOutputs(**leaves), None, plan.kept, plan.everything).loss.backward()
    gradient = leaves["logprobs"].grad
    return torch.zeros_like(leaves["logprobs"]) if gradient is None else gradient


# -- purity ------------------------------------------------------------------------------------------------------------


@law()
def runs(method: TokenObjective, trial: Trial) -> None:
    """What it returns is what the interface asks for."""
    trial.whole(method)


@law(large=True)
def pure(method: TokenObjective, trial: Trial) -> None:
    """It writes to nothing that it is given, and uses nothing that the process shares; the same call gives the same."""
    objective = compose(method, Dropping(), Doubling())
    state = objective.init_state()
    for step in (trial.first, trial.second):
        batch, leaves = step.batch(), step.leaves()
        tensors = [(f"'{name}' of the batch", values) for name, values in _tensors(batch)]
        tensors += [(f"the live '{name}'", values) for name, values in leaves.items()]
        with untouched(state, batch, tensors) as guard:
            for leaf in methods_of(method):
                replace(leaf)  # make it once more
            plan = make_plan(objective, [batch], state)
            part = plan.part(0)
            decided = [("the advantages", part.advantages), *leaves_of(part.terms, "the terms")]
            guard.guard((f"{path} of the loss", value) for path, value in decided if isinstance(value, Tensor))
            plan.loss(batch, PolicyOutputs(**leaves))
        state = plan.state
    close("called twice with the same", trial.whole(method), run_whole(method, trial.first), 0.0)


def _attributes(batch: Any) -> set[str]:
    """The attributes of a batch of tokens or responses, without its own caches."""
    return {name for name in vars(batch) if not hasattr(type(batch), name)} | {f"extra/{name}" for name in batch.extra}


def _tensors(batch: TokenBatch) -> list[tuple[str, Tensor]]:
    named = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    return [(name, value) for name, value in named if isinstance(value, Tensor)] + sorted(batch.extra.items())


@law()
def process(method: TokenObjective, trial: Trial) -> None:
    """Another process that has seen nothing of the method gives the same, whatever was seen here."""
    chain = (trial.second, trial.first.laid_out(trial.seed))  # in an order that other laws do not use
    run_whole(method, trial.first.rolled())  # other numbers of the same shapes, which a cache by shape would keep
    check_process(method, trial, run_chain, chain, close)


@law()
def declared(method: TokenObjective, trial: Trial) -> None:
    """It reads what ``needs`` and ``live_needs`` name; ``writes`` is checked at each call."""
    step = trial.first
    without = (SIGNALS.keys() | set(step.evidence)) - method.needs - {*BASICS, "advantages"}
    bare = replace(
        step,
        evidence={name: values for name, values in step.evidence.items() if name not in without},
        live={name: values for name, values in step.live.items() if name == "logprobs" or name in method.live_needs},
    )
    try:
        less = run_whole(method, bare)
    except Exception as error:  # a missing signal is None, from which user code may raise anything
        read = [name for name in sorted(without) if not _runs_without(method, step, name)]
        raise BrokenLaw(
            f"it reads what it does not declare. Add {' and '.join(map(repr, read)) or 'it'} to `needs` or "
            f"`live_needs`: {type(error).__name__}: {error}"
        ) from error
    whole = _of_the_method(trial.whole(method))
    close("without, and with, signals that it does not declare", _of_the_method(less), whole, 0.0)
    _check_policies(method, step)
    batch = bare.batch()
    read = make_plan(method, [batch]).live_rows(batch).keys() - method.live_needs - {"logprobs"}
    if read:
        raise BrokenLaw(f"a penalty reads the live {sorted(read)}, which `live_needs` does not name.")


def _of_the_method(outcome: StepOutcome) -> StepOutcome:
    """The outcome without the metrics that rlstab itself computes from entropies."""
    return replace(
        outcome, report={name: mean for name, mean in outcome.report.items() if not name.startswith("tokens/entropy")}
    )


def _runs_without(method: TokenObjective, step: Step, name: str) -> bool:
    evidence = {other: values for other, values in step.evidence.items() if other != name}
    try:
        run_whole(method, replace(step, evidence=evidence))
    except Exception:
        return False
    return True


def _check_policies(method: TokenObjective, step: Step) -> None:
    """Log-probs that a method does not read, and under a live ratio their old values, may be anything."""
    for name in sorted(BASICS - method.needs):
        batch = replace(step.batch(), live_ratio=True)
        other = replace(batch, **{name: getattr(batch, name).flip(0) - 0.5})
        mine, theirs = (_outcome(make_plan(method, [given]), step.leaves()) for given in (batch, other))
        close(f"with another '{name}', which its `needs` does not name", mine, theirs, 0.0)


def other_values(name: str, values: Tensor) -> Tensor:
    """Other possible values of a signal: permuted over tokens or responses, and scaled."""
    turned = values.flip(0)
    if not values.is_floating_point() or name in (*MARKS, "block_ids"):
        return turned
    return in_domain(name, 0.7 * turned + (0.1 if name == "entropies" else 0.0))


@law(once=True)
def used(method: TokenObjective, trial: Trial) -> None:
    """What ``needs`` and ``live_needs`` name is read, and what ``writes`` names is filled."""
    for leaf in methods_of(method):
        if any(limit.reached(leaf) for limit in leaf.about.no_op_at):
            continue
        extra, edges = sorted(leaf.needs - SIGNALS.keys() - BASICS), tuple(edges_of(leaf))
        steps = [*(rich_step(number, extra, edges) for number in range(3)), trial.first, large_step(extra)]
        unread, unfilled, undifferentiated = set(leaf.needs), set(leaf.writes), set(leaf.live_needs)
        state = leaf.init_state()
        for step in steps:
            batch = step.batch()
            plan = make_plan(leaf, [batch], state)
            unfilled -= plan.terms(0).filled()
            undifferentiated -= plan.live_rows(0).keys()
            unread -= {name for name in unread if _depends(leaf, step, state, name)}
            state = plan.state
        words = words_of(leaf)  # a signal that is used only at other values is at least named
        for names, declared, why in (
            (unread - words, "needs", "nothing reads. A host would compute it needlessly, by one more forward pass"),
            (set() if "penalties" in unfilled & words else undifferentiated, "live_needs", "no penalty reads"),
            (unfilled - words, "writes", "it never fills, so that other methods are refused needlessly"),
        ):
            if names:
                raise BrokenLaw(f"`{declared}` names '{min(names)}', which {why}. Remove it.")


def _depends(method: TokenObjective, step: Step, state: State, name: str) -> bool:
    """Whether the outcome of an optimizer step moves with a signal; the ratio of the loss does not count."""
    changed = step.given(**{name: other_values(name, step.evidence[name])})
    outcomes = []
    for given in (step, changed):
        batch = replace(given.batch(), live_ratio=name in BASICS)
        outcomes.append(_of_the_method(_outcome(make_plan(method, [batch], state), given.leaves())))
    try:
        close("with other values", outcomes[0], outcomes[1], 0.0)
    except BrokenLaw:
        return True
    return False


@law()
def ids(method: TokenObjective, trial: Trial) -> None:
    """Ids are only names: small, odd, even and very large ones give the same outcome with the same draws."""
    whole = trial.whole(method)
    for what, relabelled in relabellings(trial.first):
        old = torch.cat([trial.first.sequence_ids, trial.first.group_ids])
        with same_draws(torch.cat([relabelled.sequence_ids, relabelled.group_ids]), old):
            other = run_whole(method, relabelled)
        close(f"under {what}", whole, other, tolerances.REORDERED)


@law()
def serialises(method: TokenObjective, trial: Trial) -> None:
    """``repr`` gives an equal method, and a checkpoint gives back the state that was saved."""
    check_repr(method)
    check_state(trial.whole(method).state, method.init_state())


@law(once=True)
def later_steps(method: TokenObjective, trial: Trial) -> None:
    """Thirty optimizer steps with state: each the same in parts; the state stays of its kind, finite and bounded."""
    extra = sorted(method.needs - SIGNALS.keys() - BASICS)
    steps = [make_step("mixed", (2, 1, 3), 1, 900 + number, extra) for number in range(LONG)]

    def parts(method: TokenObjective, step: Step, state: State) -> StepOutcome:
        return joined(run_ranks(method, step.laid_out(steps.index(step)), [[[0], [2]], [[1]]], state))

    check_long_run(method, steps, Step.batch, run_whole, parts, close)


# -- agreement ---------------------------------------------------------------------------------------------------------


@law(large=True)
def split(method: TokenObjective, trial: Trial) -> None:
    """Any split into 1 to 12 parts over 1 to 3 ranks, some of them empty, gives the same over two steps with state."""
    rng = random.Random(trial.seed)
    world = rng.randint(1, 3)
    whole = ranked = None
    for number, step in enumerate((trial.first, trial.second)):
        rows = list(range(len(step.sequence_ids)))
        rng.shuffle(rows)
        ranks = dealt(rng, rows, rng.randint(1, 12), world, spared=number)
        whole = run_whole(method, step, whole.state) if whole else trial.whole(method)
        outcomes = run_ranks(method, trial.laid_out(step), ranks, ranked.state if ranked else None)
        ranked = joined(outcomes)
        where = f"step {number + 1} in {sum(map(len, ranks))} parts over {world} ranks"
        close(where, whole, ranked, tolerances.REORDERED)
        for rank, outcome in enumerate(outcomes):
            same_state(f"{where}, rank 0 and rank {rank}: the state", ranked.state, outcome.state, 0.0)
            near(f"{where}, rank 0 and rank {rank}: lr_scale", ranked.lr_scale, outcome.lr_scale, 0.0)


@law(large=True)
def permutation(method: TokenObjective, trial: Trial) -> None:
    """Tokens and sequences in another order: the same loss, gradients permuted."""
    moved, order = trial.laid_out(trial.first).shuffled(trial.seed)
    whole, other = trial.whole(method), run_whole(method, moved)
    whole.gradients = {name: gradient[order] for name, gradient in whole.gradients.items()}
    close("in another order of tokens and sequences", whole, other, tolerances.REORDERED)


@law()
def replication(method: TokenObjective, trial: Trial) -> None:
    """Every sequence twice: the same loss and metrics, half the gradient each."""
    double_step = trial.first.twice()
    once, twice = (make_plan(method, [step.batch()]).settled for step in (trial.first, double_step))
    if list(_order_statistics(once)) != list(_order_statistics(twice)):
        raise NotApplicable("the order statistics of these optimizer steps change if every value occurs twice")
    double = run_whole(method, double_step)
    for name, gradient in double.gradients.items():
        double.gradients[name] = gradient.view(2, -1).sum(0)
    close("with every sequence twice", trial.whole(method), double, tolerances.REORDERED)


def _order_statistics(settled: Settled) -> Iterator[tuple[float | None, bool]]:
    """The values to which the pools of all methods settle, and whether they are more than extreme values."""
    for value in settled.values():
        if isinstance(value, Settled):
            yield from _order_statistics(value)
        elif isinstance(value, Threshold):
            yield value.value, value.nominal > 1


@law(large=True)
def live_rows(method: TokenObjective, trial: Trial) -> None:
    """Outside the rows that a plan names, live outputs may be any finite values and get no gradient."""
    step = trial.first
    plan = make_plan(compose(method, Dropping()), [step.batch()])
    rows, outcomes = plan.live_rows(0), []
    for noise in (None, 0.7, -1.9):
        leaves = step.leaves()
        given = {
            name: leaf if noise is None or name not in rows else torch.where(rows[name], leaf, leaf.detach() + noise)
            for name, leaf in leaves.items()
        }
        # a new plan, since a plan gives each of its losses once
        outcome = _outcome(make_plan(plan.objective, [step.batch()]), leaves, PolicyOutputs(**given))
        for name, gradient in outcome.gradients.items():
            if bool((gradient[~rows[name]] != 0).any() if name in rows else (gradient != 0).any()):
                raise BrokenLaw(f"the live '{name}' has a gradient outside `plan.live_rows`.")
        outcomes.append(outcome)
    for other in outcomes[1:]:
        close("with other live outputs outside `plan.live_rows`", outcomes[0], other, 0.0)


# -- the loss ----------------------------------------------------------------------------------------------------------


@law(draws="extreme")
def finite(method: TokenObjective, trial: Trial) -> None:
    """Extreme log-probs, ratios and entropies, in float64 and in float32."""
    for where, step in (("", trial.first), (" in float32", trial.first.cast(torch.float32, torch.float32))):
        outcome = run_whole(method, step)
        gradients = ((f"the gradient of '{name}'", gradient) for name, gradient in outcome.gradients.items())
        check_finite(outcome, [("the loss", outcome.loss), ("lr_scale", outcome.lr_scale), *gradients], where)


@law(draws="smooth")
def precision(method: TokenObjective, trial: Trial) -> None:
    """float32 and bfloat16 inputs give what float64 gives on the same numbers; float64 is never narrowed to half."""
    with Wide():
        _outcome(make_plan(method, [trial.first.batch()]), trial.first.leaves())
    for dtype in (torch.float32, torch.bfloat16):
        step = with_small(trial.first).cast(dtype, torch.float64)
        narrow, wide = (run_whole(method, step.cast(held, held)) for held in (torch.float32, torch.float64))
        for outcome in (narrow, wide):  # it counts gates that are exactly 0, as a small one is in float32
            outcome.report = {name: mean for name, mean in outcome.report.items() if not name.endswith("/stopped")}
        narrow.gradients = {name: gradient.double() for name, gradient in narrow.gradients.items()}
        close(f"in {str(dtype).removeprefix('torch.')}", narrow, wide, tolerances.SINGLE)


@law()
def gradcheck(method: TokenObjective, trial: Trial) -> None:
    """The gradient is that of finite differences in float64, the anchor held fixed."""
    plan = make_plan(method, [trial.first.batch()])
    anchor = PolicyOutputs(**trial.first.live)

    def loss(live: Mapping[str, Tensor]) -> Tensor:
        return plan.loss(0, PolicyOutputs(**live), anchor=anchor).loss

    check_slopes(loss, trial.first.live, trial.seed)


@law(large=True)
def masked(method: TokenObjective, trial: Trial) -> None:
    """Tokens that were dropped have a policy gradient of exactly zero."""
    mask = Dropping()
    plan = make_plan(compose(method, mask), [batch := trial.first.batch()])
    keep = plan.terms(batch).keep
    assert keep is not None
    if bool((_policy_gradient(plan, trial.first)[~keep | ~mask.chosen(batch)] != 0).any()):
        raise BrokenLaw("a dropped token has a policy gradient: the ratio of a kept token reads it.")


@law()
def zero_advantage(method: TokenObjective, trial: Trial) -> None:
    """Without advantage the policy term has no gradient."""
    step = trial.first.given(advantages=torch.zeros_like(trial.first.evidence["advantages"]))
    if bool((_policy_gradient(make_plan(method, [step.batch()]), step) != 0).any()):
        raise BrokenLaw("all advantages are 0 and the policy term still has a gradient.")


@law()
def limits(method: TokenObjective, trial: Trial) -> None:
    """Each method is the identity at the settings of its ``no_op_at``, whatever its other settings are."""
    every = ((limit, leaf.method) for leaf in walk(method) for limit in leaf.method.about.no_op_at)
    limited = [limit.at(inside) for limit, inside in every if limit.settings is not None]
    if not limited:
        raise NotApplicable("it declares no settings at which it is the identity")
    base = run_whole(compose(), trial.first)
    for other in limited:
        outcome = replace(run_whole(other, trial.first), report=base.report, state=base.state)
        close(f"{other!r} against no method", base, outcome, 0.0)
