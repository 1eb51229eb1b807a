"""Laws of purity: an outcome is a function of what a method declares that it reads, and of nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.compose import compose, observe, within
from rlstab.core.objective import TokenObjective
from rlstab.core.plan import make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.testing.agreement import BrokenLaw, close
from rlstab.testing.edges import stretched
from rlstab.testing.elsewhere import Unreachable, run_on
from rlstab.testing.law import Case, Doubling, Dropping, NotHere, leaves_of, methods_of, tensors_of
from rlstab.testing.outcome import Outcome, run_whole
from rlstab.testing.steps import Step
from rlstab.testing.watch import Shared, Untouched


def runs(method: TokenObjective, case: Case) -> None:
    """A plan and a loss can be made: what a method returns is what the interface asks for."""
    run_whole(method, case.first)


def pure(method: TokenObjective, case: Case) -> None:
    """Nothing that belongs to others is written to, no global random number is drawn, the same call gives the same."""
    objective = compose(method, Dropping(), Doubling())
    state = objective.init_state()
    shared = Shared()
    for step in (case.first, stretched(case.first)):
        batch, leaves = step.batch(), step.leaves()
        given = Untouched.of(
            [
                *((f"'{name}' of the batch", one) for name, one in tensors_of(batch)),
                *((f"the live '{name}'", one) for name, one in leaves.items()),
                *((place, one) for place, one in leaves_of(state) if isinstance(one, Tensor)),
            ]
        )
        remembered = repr(sorted(leaves_of(state), key=repr))
        plan = make_plan(objective, [batch], state)
        part = plan.part(0)
        decided = [("the advantages", part.advantages), *leaves_of(part.terms, "the terms")]
        others = Untouched.of([(f"{place} of the loss", one) for place, one in decided if isinstance(one, Tensor)])
        plan.loss(batch, PolicyOutputs(**leaves))
        given.check()
        others.check()
        if repr(sorted(leaves_of(state), key=repr)) != remembered:
            raise BrokenLaw("it changed the state that it was given in place; `advance` returns a new one.")
        state = plan.state
    shared.check()
    one, other = run_whole(method, case.first), run_whole(method, case.first)
    close("called twice with the same", one, other, 0.0)


def process(method: TokenObjective, case: Case) -> None:
    """Another process that has seen nothing of the method gives the same, whatever was seen here."""
    assert case.sent is not None
    chain = (case.second, case.first)  # the other laws begin with the first
    run_whole(method, case.first.rolled())  # other numbers of the same shapes: what a cache by shape would keep
    here = run_on(method, chain)
    try:
        there = case.sent.run(chain, case.seed)
    except Unreachable as reason:
        raise NotHere(f"not checked, for another process cannot run it: {reason}.") from reason
    for number, (one, other) in enumerate(zip(here, there, strict=True), start=1):
        try:
            close(f"step {number} in this process, and as the first that another process sees", one, other, 0.0)
        except BrokenLaw as error:
            raise BrokenLaw(
                f"{error} Something outlives a call, or belongs to the process: a variable of the module or class, a "
                f"cache, hash() of a text, os.getpid(), a rank, a clock. What lasts belongs into the state, randomness "
                f"is batch.uniform(seed)."
            ) from error


def declared(method: TokenObjective, case: Case) -> None:
    """It reads what ``needs`` and ``live_needs`` name; ``writes`` is checked at every call."""
    without = sorted((SIGNALS.keys() | set(case.first.evidence)) - method.needs - _ALWAYS)
    step = case.first
    bare = replace(
        step,
        evidence={name: one for name, one in step.evidence.items() if name not in without},
        live={name: one for name, one in step.live.items() if name == "logprobs" or name in method.live_needs},
    )
    try:
        less = run_whole(method, bare)
    except LookupError as error:
        raise BrokenLaw(f"it reads what it does not declare: {error}") from error
    whole = run_whole(method, step)
    whole.report.pop("tokens/entropy", None)  # of rlstab itself, where entropies are there
    less.report.pop("tokens/entropy", None)
    close("without, and with, signals that it does not declare", less, whole, 0.0)
    _check_policies(method, step)
    batch = bare.batch()
    undifferentiated = make_plan(method, [batch]).live_rows(batch).keys() - method.live_needs - {"logprobs"}
    if undifferentiated:
        raise BrokenLaw(f"a penalty reads the live {sorted(undifferentiated)}, which `live_needs` does not name.")


def _check_policies(method: TokenObjective, step: Step) -> None:
    """Log-probs that a method does not read, and under a live ratio their old values, may be anything."""
    for name in sorted(BASICS - method.needs):
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
        close(f"with another '{name}', which its `needs` does not name", outcomes[0], outcomes[1], 0.0)


def serialises(method: TokenObjective, case: Case) -> None:
    """``repr`` gives an equal method, the state survives a checkpoint, and the run continues as it would have."""
    classes = {type(leaf).__name__: type(leaf) for leaf in methods_of(method)}
    text = repr(method)
    for cls in classes.values():  # a class made inside a function calls itself by a path that is no Python
        text = text.replace(f"{cls.__qualname__}(", f"{cls.__name__}(")
    if eval(text, {**classes, "compose": compose, "within": within, "observe": observe}) != method:
        raise BrokenLaw(f"its repr does not give it back: {method!r}.")
    first = run_whole(method, case.first)
    for place, one in leaves_of(first.state):
        if not isinstance(one, bool | int | float | str | Tensor) and one is not None:
            raise BrokenLaw(f"{place} is a {type(one).__name__}; a state holds numbers, bools and tensors.")
    for leaf in methods_of(method):
        _check_keys(leaf.init_state(), "state")
    tensors: list[Tensor] = []
    back = _joined_state(json.loads(json.dumps(_split_state(first.state, tensors))), tensors)
    close("resumed", run_whole(method, case.second, first.state), run_whole(method, case.second, back), 0.0)


_ALWAYS = frozenset({"old_logprobs", "logprobs", "advantages"})


def _check_keys(state: Mapping[str, Any], place: str) -> None:
    for key, one in state.items():
        if not isinstance(key, str):
            raise BrokenLaw(f"{place} has the key {key!r}; JSON holds texts. Write {str(key)!r}.")
        if key in _MARKS:
            raise BrokenLaw(
                f"{place}['{key}'] has a name by which records of a state in JSON mark a tensor, so it may come back "
                f"as one. Give it another name."
            )
        if isinstance(one, Mapping):
            _check_keys(one, f"{place}['{key}']")


#: Keys that stand for a tensor where a state is written as JSON: checkpoints before format 3 have the first.
_MARKS = frozenset({"tensor", "__tensor__"})


def _split_state(state: Mapping[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """The state as JSON holds it, a tensor as its number in the list inside of a list: a state holds no lists."""
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            plain[key] = _split_state(value, tensors)
        elif isinstance(value, Tensor):
            plain[key] = [len(tensors)]
            tensors.append(value.detach().clone())
        else:
            plain[key] = value
    return plain


def _joined_state(plain: Mapping[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    return {
        key: _joined_state(one, tensors) if isinstance(one, dict) else tensors[one[0]] if isinstance(one, list) else one
        for key, one in plain.items()
    }
