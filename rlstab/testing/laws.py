"""The laws that methods and stages obey, each a check on random trials that raises ``BrokenLaw`` with its finding.

Purity: an outcome depends only on what a method or stage declares that it reads. Agreement: one optimizer step or
rollout given in two ways has one outcome. The loss: numbers are finite, a gradient is a slope, and no token pulls that
must not. Laws that only stages have are in :mod:`rlstab.testing.stage_laws`.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from rlstab import Plan, PolicyOutputs, Settled, State, Threshold, TokenObjective, compose, make_plan, observe, within
from rlstab.core.batch import BASICS
from rlstab.core.comm import LocalComm
from rlstab.core.compose import walk
from rlstab.core.loss import loss_of_part
from rlstab.core.method import Method, measure_all
from rlstab.core.metrics import RunningMeans
from rlstab.errors import OutOfRange
from rlstab.testing.agreement import (
    BrokenLaw,
    check_bounded,
    check_slopes,
    check_state,
    leaves_of,
    same_state,
    size_of,
)
from rlstab.testing.edges import draw_step, edges_of, read_by, words_of
from rlstab.testing.fresh_process import PickledMethod, Unreachable, methods_of, own_signals
from rlstab.testing.relabel import relabellings, same_draws
from rlstab.testing.run import Outcome, Parts, joined, run_chain, run_ranks, run_whole
from rlstab.testing.steps import Step, large_step, make_step
from rlstab.testing.tolerances import REORDERED, SINGLE
from rlstab.testing.watch import ReadOnly, Shared, Wide
from rlstab.zoo.random_mask import RandomMask
from rlstab.zoo.sign_weights import SignWeights

#: Raises :class:`BrokenLaw`, or :class:`NotApplicable`.
LawCheck: TypeAlias = Callable[[Any, Any], None]


#: Numbers of optimizer steps or rollouts in a long run, and after it with only the state advancing.
LONG, LONGER = 30, 100
#: How the sequences or groups of a long run are cut into parts and ranks, in turn.
CUTS: Sequence[Sequence[Parts]] = ([[[0], [2]], [[1]]], [[[1, 2], [0]]], [[], [[2], [0, 1]]], [[[1]], [[0, 2]], []])


class NotApplicable(Exception):
    """A law does not apply to this method; the text says why."""


@dataclass(frozen=True)
class Trial:
    """A trial of a law: two optimizer steps in a row, or three rollouts, and a seed.

    Attributes:
        chain: the optimizer steps or rollouts.
        seed: the seed of cuts, orders and the layout of batches of tokens.
        pickled: the method for another process, as it was before any law saw it.
    """

    chain: Sequence[Any]
    seed: int
    pickled: PickledMethod
    _ran: dict[int, list[tuple[Any, State, Any]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __str__(self) -> str:
        return ", ".join(map(repr, self.chain))

    @property
    def first(self) -> Step:
        """The first optimizer step."""
        step: Step = self.chain[0]
        return step

    def run(self, method: Method[Any]) -> Iterator[tuple[Any, State, Any]]:
        """Each optimizer step or rollout with the state before it and its outcome; run once for all laws."""
        state, ran = method.init_state(), self._ran.setdefault(id(method), [])
        for number, item in enumerate(self.chain):
            if number == len(ran):
                ran.append((item, state, run_whole(method, item, state)))
            yield ran[number]
            state = ran[number][2].state

    def whole(self, method: Method[Any]) -> Any:
        """The outcome of the first optimizer step or rollout."""
        return next(self.run(method))[2]


@dataclass(frozen=True)
class Law:
    """One law, of methods or of stages.

    Attributes:
        name: the name of the law, by which an exception is declared.
        says: one sentence.
        check: the check of a method or stage on a trial.
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


#: The laws of methods, in the order of the report. If the first is broken, no other one is checked.
LAWS: list[Law] = []
#: The laws of stages, in the order of the report. If the first is broken, no other one is checked.
STAGE_LAWS: list[Law] = []


def law(*sets: list[Law], **options: Any) -> Callable[[Any], Any]:
    """A decorator that makes a check the next law of these sets, with the name and docstring of the function."""

    def add(check: Any) -> Any:
        new_law = Law(check.__name__.replace("_", " "), str(check.__doc__).rstrip("."), check, **options)
        for laws in sets:
            laws.append(new_law)
        return check

    return add


#: Partners of a method in a composition: one drops tokens, one writes weights.
DROPPING, WEIGHING = RandomMask(share=0.4, sign="all", seed=3), SignWeights(positive=2.0)


def check_finite(outcome: Outcome, where: str = "") -> None:
    """Require that an outcome, its metrics and its state are finite numbers.

    Raises:
        BrokenLaw: names the first that is not.
    """
    metrics = ((f"the metric '{name}'", mean.value) for name, mean in outcome.report.items() if float(mean.count))
    results = ("the loss", outcome.loss), *outcome.shared.items(), *outcome.results.items()
    for name, value in (*results, *metrics, *leaves_of(outcome.state)):
        values = torch.as_tensor(value).detach() if isinstance(value, int | float | Tensor) else torch.zeros(0)
        if not bool(values.isfinite().all()):
            raise BrokenLaw(
                f"{name} is {float(values[~values.isfinite()].flatten()[0])}{where}. Clamp a log before `exp`, and "
                f"define the value of an empty set."
            )


def check_reads(method: Method[Any], trial: Trial) -> None:
    """Require that a method or stage gives the same without the evidence that it does not declare.

    Raises:
        BrokenLaw: names what it reads.
    """
    for item, state, outcome in trial.run(method):
        bare = item.only(read_by(method))
        try:
            less = run_whole(method, bare, state)
        except Exception as error:  # missing evidence may be None, from which user code may raise anything
            read = item.columns.keys() - bare.columns.keys()
            for name in sorted(read):
                with suppress(Exception):
                    run_whole(method, item.only(item.columns.keys() - {name}), state)
                    read -= {name}
            raise BrokenLaw(
                f"it reads what it does not declare. Add {' and '.join(map(repr, sorted(read))) or 'it'} to `needs` or "
                f"`live_needs`: {type(error).__name__}: {error}"
            ) from error
        _own(less).require_same("without, and with, evidence that it does not declare", _own(outcome), 0.0)


def _own(outcome: Any) -> Any:
    """The outcome without the metrics that rlstab itself computes from entropies."""
    report = {name: mean for name, mean in outcome.report.items() if not name.startswith("tokens/entropy")}
    return replace(outcome, report=RunningMeans(report))


def unread_in(method: Method[Any], chain: Iterable[Any]) -> set[str]:
    """Names in ``needs`` on which no outcome in a chain depends, and which the code does not name."""
    unread, state = set(method.needs), method.init_state()
    for item in chain:
        unread &= item.columns.keys()
        for name in sorted(unread):
            try:  # an outcome moves with it, beyond the ratio of the loss, or refuses a value
                outcome, other = (_own(run_whole(method, variant, state)) for variant in item.varied(name))
                outcome.require_same("with other values", other, 0.0)
            except (BrokenLaw, OutOfRange):
                unread.remove(name)
        state = run_whole(method, item, state).state
    return unread - words_of(method)  # a signal that is used only at other values is at least named


def check_long_run(method: Method[Any], chain: Sequence[Any]) -> None:
    """Require that each step or rollout is the same whole and in parts, with a new state of the same kind and size.

    The cut changes from one to the next, and each of the two runs follows its own state.

    Raises:
        BrokenLaw: it does not.
        NotApplicable: the method has no state.
    """
    if not method.init_state():
        raise NotApplicable("it has no state")
    state = state_of_parts = initial = method.init_state()
    sizes = []
    for number, item in enumerate(chain, start=1):
        ranks = CUTS[number % len(CUTS)]
        with untouched_state(state), untouched_state(state_of_parts):
            outcome = run_whole(method, item, state)
            parts = joined(run_ranks(method, item.laid_out(number), ranks, state_of_parts))
        outcome.require_same(f"number {number} of a long run, whole and over {len(ranks)} ranks", parts, REORDERED)
        check_state(outcome.state, initial)
        state, state_of_parts = outcome.state, parts.state
        sizes.append(size_of(state))
    for number in range(LONGER):
        state = measure_all(method, [chain[number % len(chain)].batch()], state, LocalComm())[1]
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
def untouched(state: State, batch: Any, live: Mapping[str, Tensor] | None = None) -> Iterator[ReadOnly]:
    """A context in which nothing may write to a batch or live outputs, add to it, or use what the process shares."""
    guard, attributes = ReadOnly(), _attributes(batch)
    guard.guard((f"'{name}' of the batch", value) for name, value in {**vars(batch), **batch.extra}.items())
    guard.guard((f"the live '{name}'", value) for name, value in (live or {}).items())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2**40 + 1)  # also detects a method that sets its own seed again
        shared = Shared()
        with untouched_state(state):
            yield guard
        guard.check()
        shared.check()
    if _attributes(batch) != attributes:
        raise BrokenLaw("it put something on the batch, which belongs to others. What lasts belongs in the state.")


def _attributes(batch: Any) -> set[str]:
    """The attributes of a batch of tokens or responses, without its own caches."""
    return {name for name in vars(batch) if not hasattr(type(batch), name)} | {f"extra/{name}" for name in batch.extra}


def _policy_gradient(plan: Plan, step: Step) -> Tensor:
    """The gradient of the live log-probs through the policy term of the only part."""
    leaves = step.leaves()
    bare = replace(plan.part(0), terms=replace(plan.part(0).terms, penalties={}))
    loss_of_part(bare, PolicyOutputs(**leaves), None, plan.kept, plan.everything).loss.backward()
    gradient = leaves["logprobs"].grad
    return torch.zeros_like(leaves["logprobs"]) if gradient is None else gradient


# -- laws of both ------------------------------------------------------------------------------------------------------


@law(LAWS, STAGE_LAWS)
def runs(method: Method[Any], trial: Trial) -> None:
    """What it returns is what the interface asks for."""
    trial.whole(method)


@law(LAWS, STAGE_LAWS)
def process(method: Method[Any], trial: Trial) -> None:
    """Another process that has seen nothing of it gives the same, whatever was seen here."""
    first, *later = trial.chain
    chain = (*reversed(later), first.laid_out(trial.seed))  # in an order that other laws do not use
    run_whole(method, first.rolled())  # other numbers of the same shapes, which a cache by shape would keep
    outcomes = run_chain(method, chain)
    try:
        other_outcomes = trial.pickled.run(run_chain, chain)
    except Unreachable as reason:
        raise NotApplicable(f"not checked, since another process cannot run it: {reason}.") from reason
    for number, (outcome, other) in enumerate(zip(outcomes, other_outcomes, strict=True), start=1):
        try:
            outcome.require_same(f"number {number} here, and as the first that another process sees", other, 0.0)
        except BrokenLaw as error:
            raise BrokenLaw(
                f"{error} Something outlives a call, or belongs to the process: a variable, a cache, hash() of a text, "
                f"a rank, a clock. What lasts belongs in the state; random numbers come from batch.uniform(seed)."
            ) from error


@law(LAWS, STAGE_LAWS)
def serialises(method: Method[Any], trial: Trial) -> None:
    """``repr`` gives an equal method or stage, and a checkpoint gives back the states that were saved."""
    text: str = repr(method)
    names: dict[str, Any] = {"compose": compose, "within": within, "observe": observe}
    for cls in map(type, methods_of(method)):  # the qualified name of one made inside a function cannot be evaluated
        text, names[cls.__name__] = text.replace(f"{cls.__qualname__}(", f"{cls.__name__}("), cls
    if eval(text, names) != method:
        raise BrokenLaw(f"its repr does not give it back: {method!r}.")
    for _, _, outcome in trial.run(method):
        check_state(outcome.state, method.init_state())


@law(LAWS, STAGE_LAWS, large=True)
def split(method: Method[Any], trial: Trial) -> None:
    """Any split into 1 to 12 parts over 1 to 3 ranks, some of them empty, gives the same, with state too."""
    rng = random.Random(trial.seed)
    world = rng.randint(1, 3)
    for number, (item, state, outcome_whole) in enumerate(trial.run(method), start=1):
        units = list(item.units)
        rng.shuffle(units)
        parts: list[list[int]] = [[] for _ in range(rng.randint(1, 12))]
        for unit in units:
            rng.choice(parts).append(unit)
        ranks: list[list[list[int]]] = [[] for _ in range(world)]
        for part in parts:  # after the first time, one of several ranks gets nothing
            rng.choice((ranks[1:] if number > 1 else ranks) or ranks).append(part)
        rng.shuffle(ranks)
        outcome = joined(run_ranks(method, item.laid_out(trial.seed), ranks, state))
        outcome_whole.require_same(f"number {number} in {len(parts)} parts over {world} ranks", outcome, REORDERED)


# -- purity ------------------------------------------------------------------------------------------------------------


@law(LAWS, large=True)
def pure(method: TokenObjective, trial: Trial) -> None:
    """It writes to nothing that it is given, and uses nothing that the process shares; the same call gives the same."""
    objective = compose(method, DROPPING, WEIGHING)
    state = objective.init_state()
    for step in trial.chain:
        batch, leaves = step.batch(), step.leaves()
        with untouched(state, batch, leaves) as guard:
            for leaf in methods_of(method):
                replace(leaf)  # make it once more
            plan = make_plan(objective, [batch], state)
            part = plan.part(0)
            decided = ("the advantages", part.advantages), *leaves_of(part.terms, "the terms")
            guard.guard((f"{path} of the loss", value) for path, value in decided)
            plan.loss(batch, PolicyOutputs(**leaves))
        state = plan.state
    trial.whole(method).require_same("called twice with the same", run_whole(method, trial.first), 0.0)


@law(LAWS)
def declared(method: TokenObjective, trial: Trial) -> None:
    """It reads what ``needs`` and ``live_needs`` name; ``writes`` is checked at each call."""
    check_reads(method, trial)
    for name in sorted(BASICS - method.needs):  # log-probs that it does not read may be anything under a live ratio
        outcome, other = (run_whole(method, step) for step in trial.first.varied(name))
        outcome.require_same(f"with another '{name}', which its `needs` does not name", other, 0.0)
    batch = trial.first.batch()
    read = make_plan(method, [batch]).live_rows(batch).keys() - method.live_needs - {"logprobs"}
    if read:
        raise BrokenLaw(f"a penalty reads the live {sorted(read)}, which `live_needs` does not name.")


@law(LAWS, once=True)
def used(method: TokenObjective, trial: Trial) -> None:
    """What ``needs`` and ``live_needs`` name is read, and what ``writes`` names is filled."""
    for leaf in methods_of(method):
        if any(limit.reached(leaf) for limit in leaf.about.no_op_at):
            continue
        extra, edges = own_signals(leaf), tuple(edges_of(leaf))
        steps = [*(draw_step(number, extra, edges) for number in range(3)), trial.first, large_step(extra)]
        unfilled, undifferentiated, state = set(leaf.writes), set(leaf.live_needs), leaf.init_state()
        for step in steps:
            plan = make_plan(leaf, [step.batch()], state)
            unfilled -= plan.terms(0).filled()
            undifferentiated -= plan.live_rows(0).keys()
            state = plan.state
        words, unread = words_of(leaf), unread_in(leaf, steps)
        for names, declared, reason in (
            (unread, "needs", "nothing reads. A host would compute it needlessly, by one more forward pass"),
            (set() if "penalties" in unfilled & words else undifferentiated, "live_needs", "no penalty reads"),
            (unfilled - words, "writes", "it never fills, so that other methods are refused needlessly"),
        ):
            if names:
                raise BrokenLaw(f"`{declared}` names '{min(names)}', which {reason}. Remove it.")


@law(LAWS)
def ids(method: TokenObjective, trial: Trial) -> None:
    """Ids are only names: small, odd, even and very large ones give the same outcome with the same draws."""
    for description, other in relabellings(trial.first):
        with same_draws(other, trial.first):
            trial.whole(method).require_same(f"under {description}", run_whole(method, other), REORDERED)


@law(LAWS, once=True)
def later_steps(method: TokenObjective, trial: Trial) -> None:
    """Thirty optimizer steps with state: the same in parts under changing cuts; the state stays finite and bounded."""
    extra = own_signals(method)
    check_long_run(method, [make_step("mixed", (5, 2, 6), 1, 900 + number, extra) for number in range(LONG)])


# -- agreement ---------------------------------------------------------------------------------------------------------


@law(LAWS, STAGE_LAWS, large=True)
def permutation(method: Method[Any], trial: Trial) -> None:
    """Tokens and sequences, or responses and groups, in another order: the same, permuted."""
    for item, state, outcome in trial.run(method):
        moved, order = item.laid_out(trial.seed).shuffled(trial.seed)
        permuted = outcome.each(lambda values, order=order: values[order])
        permuted.require_same("in another order", run_whole(method, moved, state), REORDERED)


@law(LAWS)
def replication(method: TokenObjective, trial: Trial) -> None:
    """Every sequence twice: the same loss and metrics, half the gradient each."""
    double_step = trial.first.twice()
    settled, doubled = (make_plan(method, [step.batch()]).settled for step in (trial.first, double_step))
    if list(_order_statistics(settled)) != list(_order_statistics(doubled)):
        raise NotApplicable("the order statistics of these optimizer steps change if every value occurs twice")
    double = run_whole(method, double_step).each(lambda gradient: gradient.view(2, -1).sum(0))
    trial.whole(method).require_same("with every sequence twice", double, REORDERED)


def _order_statistics(settled: Settled) -> Iterator[tuple[float | None, bool]]:
    """The values to which the pools of all methods settle, and whether they are more than extreme values."""
    for value in settled.values():
        if isinstance(value, Settled):
            yield from _order_statistics(value)
        elif isinstance(value, Threshold):
            yield value.value, value.nominal > 1


@law(LAWS, large=True)
def live_rows(method: TokenObjective, trial: Trial) -> None:
    """Outside the rows that a plan names, live outputs may be any finite values and get no gradient."""
    step = trial.first
    plan = make_plan(compose(method, DROPPING), [step.batch()])
    rows, outcomes = plan.live_rows(0), []
    for noise in (None, 0.7, -1.9):
        leaves = step.leaves()
        live_values = {
            name: leaf if noise is None or name not in rows else torch.where(rows[name], leaf, leaf.detach() + noise)
            for name, leaf in leaves.items()
        }
        # a new plan, since a plan gives each of its losses once
        out = make_plan(plan.objective, [step.batch()]).loss(0, PolicyOutputs(**live_values))
        out.loss.backward()
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        for name, gradient in gradients.items():
            if bool((gradient[~rows[name]] != 0).any() if name in rows else (gradient != 0).any()):
                raise BrokenLaw(f"the live '{name}' has a gradient outside `plan.live_rows`.")
        outcomes.append(Outcome(gradients, {}, out.loss.item(), RunningMeans(out.report)))
    for other in outcomes[1:]:
        outcomes[0].require_same("with other live outputs outside `plan.live_rows`", other, 0.0)


# -- the loss ----------------------------------------------------------------------------------------------------------


@law(LAWS, draws="extreme")
def finite(method: TokenObjective, trial: Trial) -> None:
    """Extreme log-probs, ratios and entropies, in float64 and in float32."""
    for where, step in (("", trial.first), (" in float32", trial.first.each(Tensor.float))):
        check_finite(run_whole(method, step), where)


@law(LAWS, draws="smooth")
def precision(method: TokenObjective, trial: Trial) -> None:
    """float32 and bfloat16 inputs give what float64 gives on the same numbers; float64 is never narrowed to half."""
    with Wide():
        run_whole(method, trial.first)
    for dtype, rounded in {"float32": Tensor.float, "bfloat16": Tensor.bfloat16}.items():
        step = trial.first.each(rounded).each(Tensor.double)
        narrow, wide = run_whole(method, step.each(Tensor.float)), run_whole(method, step)
        for outcome in (narrow, wide):  # it counts gates that are exactly 0, as a small one is in float32
            outcome.report = RunningMeans({k: mean for k, mean in outcome.report.items() if not k.endswith("/stopped")})
        narrow.each(Tensor.double).require_same(f"in {dtype}", wide, SINGLE)


@law(LAWS)
def gradcheck(method: TokenObjective, trial: Trial) -> None:
    """The gradient is that of finite differences in float64, the anchor held fixed."""
    plan = make_plan(method, [trial.first.batch()])
    anchor = PolicyOutputs(**trial.first.live)

    def loss(live: Mapping[str, Tensor]) -> Tensor:
        return plan.loss(0, PolicyOutputs(**live), anchor=anchor).loss

    check_slopes(loss, trial.first.live, trial.seed)


@law(LAWS, large=True)
def masked(method: TokenObjective, trial: Trial) -> None:
    """Tokens that were dropped have a policy gradient of exactly zero."""
    plan = make_plan(compose(method, DROPPING), [trial.first.batch()])
    if bool((_policy_gradient(plan, trial.first)[~plan.part(0).kept] != 0).any()):
        raise BrokenLaw("a dropped token has a policy gradient: the ratio of a kept token reads it.")


@law(LAWS)
def zero_advantage(method: TokenObjective, trial: Trial) -> None:
    """Without advantage the policy term has no gradient."""
    step = trial.first.given(advantages=torch.zeros_like(trial.first.columns["advantages"]))
    if bool((_policy_gradient(make_plan(method, [step.batch()]), step) != 0).any()):
        raise BrokenLaw("all advantages are 0 and the policy term still has a gradient.")


@law(LAWS)
def limits(method: TokenObjective, trial: Trial) -> None:
    """Each method is the identity at the settings of its ``no_op_at``, whatever its other settings are."""
    pairs = ((limit, leaf.method) for leaf in walk(method) for limit in leaf.method.about.no_op_at)
    limited = [limit.at(method_inside) for limit, method_inside in pairs if limit.settings is not None]
    if not limited:
        raise NotApplicable("it declares no settings at which it is the identity")
    base = run_whole(compose(), trial.first)
    for other in limited:
        outcome = replace(run_whole(other, trial.first), report=base.report, state=base.state)
        base.require_same(f"{other!r} against no method", outcome, 0.0)
