"""Checks of a method when its class is created and when it returns, without waiting for a device.

Each error names the method and ends with the fix. The laws of :mod:`rlstab.testing` check what only a run shows.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch, described
from rlstab.core.metadata import SOURCES
from rlstab.core.stats import Mean, Pool, Stat, Summary
from rlstab.core.terms import WRITABLE, Bounds, Gate, Penalty, Surrogate, Terms
from rlstab.errors import MethodError, OutOfRange, did_you_mean, kind_of

#: How far one policy has moved from another, which a method may compare: the live policy from `old_logprobs` (the
#: ratio); the policy at the start of the optimizer step, `logprobs`, from `old_logprobs`; `old_logprobs` from
#: `rollout_logprobs`, what the sampler reported; `logprobs` from `rollout_logprobs`.
DRIFT = ("live", "step", "sampler", "start")
#: Outputs of the live policy that a penalty may differentiate beyond the log-probs.
LIVE = ("entropies", "log_kept_mass", "log_support_mass", "teacher_divergence")
#: What a method declares as sets of names, with the known names, where only some are.
SETS: Mapping[str, tuple[str, ...]] = {
    "needs": (),
    "live_needs": LIVE,
    "writes": WRITABLE,
    "reads_drift": DRIFT,
}
#: Attributes of the class, of which an annotation does not make a setting.
DECLARED = (*SETS, "name", "about", "excludes", "signal_options", "ascending")
#: Names of the combinators, which a method cannot have.
COMBINATORS = ("composition", "observe", "within")
#: First parts of the metrics of the loss, which a method cannot have as a name either.
RESERVED = ("ratio", "tokens")
#: The name under which an observed method reports its trust region.
_OBSERVED = frozenset({"clip", "surrogate"})


def _require(value: object, kind: type, owner: str, fix: str) -> None:
    if not isinstance(value, kind):
        raise MethodError(f"{owner} {kind_of(value)}. {fix}")


def _require_known(owner: str, names: Set[str], allowed: Collection[str]) -> None:
    for name in sorted(names - set(allowed)):
        raise MethodError(f"{owner} '{name}', which does not exist. {did_you_mean(name, allowed)}")


def check_class(cls: Any) -> None:
    """Refuse a class that cannot be a method.

    Raises:
        MethodError: it has no name, or a declaration is not a set of known names.
    """
    owner, name = cls.__qualname__, getattr(cls, "name", None)
    if not (isinstance(name, str) and name.isidentifier()):
        raise MethodError(f"{owner} is named {name!r}, expected letters, digits and underscores, such as 'my_method'.")
    if name in (*COMBINATORS, *RESERVED):
        raise MethodError(
            f"{owner} is named '{name}', as a combinator or metrics of rlstab are. Give it another `name`."
        )
    for attribute in SETS:
        value: object = getattr(cls, attribute, frozenset())  # a stage writes no terms
        if not isinstance(value, property):
            check_declared(owner, attribute, value)
    excludes = getattr(cls, "excludes", {})
    if not isinstance(excludes, Mapping | property):
        raise MethodError(f"{owner}: excludes = {excludes!r}, expected reasons by name, such as {{'name': 'why'}}.")
    _require_known(f"{owner}: about addresses", cls.about.addresses, SOURCES)


def check_declared(owner: str, attribute: str, value: object) -> None:
    """Refuse a declaration that is not a set of names, or that names something unknown.

    Args:
        owner: the class.
        attribute: one of :data:`SETS`.
        value: what is declared.

    Raises:
        MethodError: with the nearest known name.
    """
    allowed = SETS[attribute]
    if not isinstance(value, Set) or not all(isinstance(name, str) for name in value):
        example = allowed[0] if allowed else "entropies"
        raise MethodError(
            f"{owner}: {attribute} = {value!r}, expected a set of names, such as {attribute} = {{'{example}'}}."
        )
    if allowed:
        _require_known(f"{owner}: {attribute} names", value, allowed)
    if attribute == "needs" and "advantages" in value:
        raise MethodError(f"{owner}: needs names 'advantages', which every batch has. Read batch.advantages instead.")


def checked_stat(owner: str, method: str, stat: Stat) -> Stat:
    """Return what ``measure`` or ``measure_again`` returned if it is summaries by name.

    Raises:
        MethodError: it is something else.
    """
    _require(stat, Mapping, f"'{owner}': {method} returned", "Return summaries, such as {'entropy': Mean.of(values)}.")
    for name, summary in stat.items():
        if not (isinstance(name, str) and isinstance(summary, get_args(Summary))):
            raise MethodError(
                f"'{owner}': {method} returned {kind_of(summary)} under {name!r}, which cannot be merged over parts. "
                f"Wrap it, under a text: Mean.of, Pool.top, Pool.quantile or Grouped.of."
            )
    return stat


def check_same(owner: str, method: str, stats: Iterable[Stat], without: Stat) -> None:
    """Refuse summaries that differ in name or kind: ranks would wait for each other, or merge different things.

    Args:
        owner: name of the method.
        method: which of its methods measured.
        stats: the summaries of the parts.
        without: the summaries of a batch without tokens, which some rank may have as its only one.

    Raises:
        MethodError: names a summary that is missing in one, or differs between both.
    """
    for stat in stats:
        for name in sorted(stat.keys() | without.keys()):
            part_kind, empty_kind = _sort(stat.get(name)), _sort(without.get(name))
            if part_kind != empty_kind:
                raise MethodError(
                    f"'{owner}': {method} returned {part_kind} for '{name}' on a part of the optimizer step, and "
                    f"{empty_kind} on one without tokens, which a rank may have. Return the same on both."
                )


def check_mapping(owner: str, method: str, state: object) -> None:
    """Refuse a state that is not a mapping.

    Raises:
        MethodError: names the method that returned it.
    """
    _require(state, Mapping, f"'{owner}': {method} returned", "Return the state, a dict, perhaps empty.")


def checked_state(owner: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what ``advance`` returned if it can be the state of the next optimizer step.

    Raises:
        MethodError: it is not a mapping, or has other keys than the state that it was given.
    """
    check_mapping(owner, "advance", after)
    for key in sorted(before.keys() ^ after.keys(), key=str):
        change, fix = ("dropped", "Return {**state, ...}") if key in before else ("added", "Add it to init_state")
        raise MethodError(f"'{owner}': advance {change} '{key}', and a state keeps the keys of init_state. {fix}.")
    return after


def check_state(owner: str, state: object, initial: object) -> None:
    """Refuse a state that another objective made.

    Raises:
        OutOfRange: names what is missing, or an entry that belongs to no method.
    """
    if not isinstance(initial, Mapping):
        return  # reported when the method is called
    if not isinstance(state, Mapping):
        raise OutOfRange(f"{owner} is {kind_of(state)}, expected a mapping. Begin with objective.init_state().")
    for key in [*initial, *state]:
        if key not in state or key not in initial:
            raise OutOfRange(
                f"{owner} {'lacks' if key in initial else 'has'} '{key}': it is of another objective or other "
                f"settings. Expected: {', '.join(sorted(map(str, initial))) or 'nothing'}. Begin with "
                "objective.init_state()."
            )
        check_state(f"{owner}['{key}']", state[key], initial[key])


def _sort(summary: Summary | None) -> str:
    """The kind of a summary, which merges with its own kind: a pool with one of the same order statistic."""
    return f"a Pool({summary.rule}, {summary.level})" if isinstance(summary, Pool) else kind_of(summary)


def checked_terms(owner: str, terms: Terms, batch: TokenBatch, writes: Set[str]) -> Terms:
    """Return what ``terms`` returned if a loss can be made of it, with its invalid_count on the device.

    Its functions are checked too, whenever the loss calls them. The terms of a combinator are made of checked
    ones.

    Raises:
        MethodError: a value has the wrong type, shape or dtype for its field, or is not declared.
    """
    _require(terms, Terms, f"'{owner}': terms returned", "Return Terms(...), or Terms() to ask for nothing.")
    for name, example in (("gates", "Gate(function)"), ("penalties", "Penalty(...)"), ("report", "Mean.of(values)")):
        _require(getattr(terms, name), Mapping, f"'{owner}': Terms.{name} is", f"Write {{'name': {example}}}.")
    _check_names(owner, terms)
    if surplus := sorted(terms.filled() - writes):
        raise MethodError(f"'{owner}' fills {', '.join(surplus)}, which `writes` does not name. Add it.")
    for name, kind in (("keep", "bool"), ("unclipped", "bool"), ("weight", "float"), ("bonus", "float")):
        _check_tokens(f"'{owner}': Terms.{name}", getattr(terms, name), batch, kind)
    for name, metric in terms.report.items():
        _require(metric, Mean, f"'{owner}': the metric '{name}' is", "Write Mean.scalar(number), or Mean.of(values).")
    if (bounds := terms.bounds) is not None:
        _require(bounds, Bounds, f"'{owner}': Terms.bounds is", "Write Bounds(low, high).")
        for name, value in (("low", bounds.low), ("high", bounds.high)):
            if isinstance(value, Tensor):
                _check_tokens(f"'{owner}': Terms.bounds.{name}", value, batch, "float")
            else:
                expected = "a number of at least 0, or one per token"
                _require_number(f"'{owner}': Terms.bounds.{name} is", value, lambda number: number >= 0, expected)
        if bounds.dual is not None:
            expected = "a number above 1, or None"
            _require_number(f"'{owner}': Terms.bounds.dual is", bounds.dual, lambda number: number > 1, expected)
    if (scale := terms.lr_scale) is not None:
        _require_number(
            f"'{owner}': Terms.lr_scale is", scale, lambda number: 0 <= number < math.inf, "a number of at least 0"
        )
    named = f"'{owner}': the {{}} '{{}}'".format
    return replace(
        terms,
        gates={name: _checked(named("gate", name), gate, Gate, batch) for name, gate in terms.gates.items()},
        penalties={
            name: _checked_penalty(named("penalty", name), penalty, batch) for name, penalty in terms.penalties.items()
        },
        ratio=_per_token(f"'{owner}': Terms.ratio", terms.ratio),
        surrogate=terms.surrogate and _checked(f"'{owner}': Terms.surrogate", terms.surrogate, Surrogate, batch),
        aggregate=_per_token(f"'{owner}': Terms.aggregate", terms.aggregate),
        invalid_count=_invalid_count(terms),
    )


def _check_names(owner: str, terms: Terms) -> None:
    """Refuse names that could give two metrics the same name: each becomes a part of the name of a metric."""
    taken = {"gate", "stopped"} if "" in terms.gates else set()
    taken |= {"value"} if "" in terms.penalties else set()
    taken |= {name for name in terms.report if str(name).startswith("would_")}
    reserved = {"gates": _OBSERVED, "penalties": frozenset[str](), "report": taken}
    for field, noun in (("gates", "gate"), ("penalties", "penalty"), ("report", "metric")):
        for name in getattr(terms, field):
            valid = isinstance(name, str) and (name.isidentifier() or (name == "" and field != "report"))
            if not valid or name in reserved[field]:
                raise MethodError(
                    f"'{owner}': a {noun} is named {name!r}, which rlstab reserves, or which has more than letters, "
                    f"digits and underscores. Rename it."
                )


def _per_token(owner: str, fn: Any) -> Any:
    """A function of a method, checked to return one value per token."""
    if fn is None:
        return None

    def held(first: Any, *rest: Any) -> Tensor:
        values = fn(first, *rest)
        shape = (first if isinstance(first, Tensor) else first.logprobs).shape
        if not isinstance(values, Tensor) or values.shape != shape:
            raise MethodError(
                f"{owner} returned {described(values)} for {shape[0]} tokens. Return one value per token, shape (n,)."
            )
        return values

    return held


def _checked(owner: str, term: Any, kind: type, batch: TokenBatch) -> Any:
    """A gate, a penalty or a surrogate, whose function is checked to return one value per token."""
    _require(term, kind, f"{owner} is", f"Write {kind.__name__}(...) with its function.")
    _check_tokens(f"{owner} has a `where` that", getattr(term, "where", None), batch, "bool")
    return replace(term, fn=_per_token(owner, term.fn))


def _checked_penalty(owner: str, result: Any, batch: TokenBatch) -> Penalty:
    penalty: Penalty = _checked(owner, result, Penalty, batch)
    _require_number(f"{owner} has the coefficient", penalty.coefficient, math.isfinite, "a finite number")
    _require(penalty.reads, Set, f"{owner} has `reads` that is", "Write a set of names, such as {'entropies'}.")
    _require_known(f"{owner} reads the live", penalty.reads, ("logprobs", *LIVE))
    if penalty.aggregate is None:
        return penalty
    return replace(penalty, aggregate=_per_token(f"{owner}: its `aggregate`", penalty.aggregate))


def _invalid_count(terms: Terms) -> Tensor | None:
    """Count negative, NaN or infinite weights, NaN or infinite bonuses, negative or NaN bounds; None without any."""
    counts = []
    if terms.weight is not None:
        counts.append((~((terms.weight >= 0) & (terms.weight < math.inf))).count_nonzero())
    if terms.bonus is not None:
        counts.append((~terms.bonus.isfinite()).count_nonzero())
    if terms.bounds is not None:
        sides = [side for side in (terms.bounds.low, terms.bounds.high) if isinstance(side, Tensor)]
        counts += [(~(side >= 0)).count_nonzero() for side in sides]
    return torch.stack(counts).sum() if counts else None


def _check_tokens(owner: str, values: object, batch: TokenBatch, kind: str) -> None:
    if values is None:
        return
    like = batch.logprobs
    if isinstance(values, Tensor) and values.shape == like.shape and values.device == like.device:
        fits = values.dtype == torch.bool if kind == "bool" else values.is_floating_point()
        if fits and not values.requires_grad:
            return
    raise MethodError(
        f"{owner} is {described(values)}, expected {kind} of shape ({len(batch)},) on {like.device} without grad. Make "
        f"one value per token from the tensors of the batch."
    )


def _require_number(owner: str, value: object, allowed: Callable[[float], bool], expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not allowed(value):
        raise MethodError(f"{owner} {value!r}, expected {expected}.")
