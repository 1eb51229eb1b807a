"""What a method has to be, checked when its class is created and when it returns, without waiting for a device.

Each error names the method and ends with the fix. The laws of :mod:`rlstab.testing` check what only a run can show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.metadata import SOURCES, About
from rlstab.core.stats import Mean, Pool, Stat, Summary
from rlstab.core.terms import WRITABLE, Bounds, Gate, Penalty, Surrogate, Terms
from rlstab.errors import MethodError, OutOfRange, did_you_mean, kind_of

#: How far one policy has moved from another: what a method may compare.
DRIFT: Mapping[str, str] = {
    "live": "the live policy from `old_logprobs`: the ratio",
    "step": "the policy at the start of the optimizer step, `logprobs`, from `old_logprobs`",
    "sampler": "`old_logprobs` from `rollout_logprobs`, what the sampler reported",
    "start": "the policy at the start of the optimizer step, `logprobs`, from `rollout_logprobs`",
}
#: Outputs of the live policy that a penalty may differentiate beyond the log-probs.
LIVE = ("entropies", "log_kept_mass")
#: What a method declares as sets of names, with the known names, where only some are.
SETS: Mapping[str, tuple[str, ...]] = {
    "needs": (),
    "live_needs": LIVE,
    "writes": WRITABLE,
    "reads_drift": tuple(DRIFT),
}
#: What a method declares as reasons by name.
REASONS = ("excludes", "requires")
#: What belongs to the class, so that an annotation does not make a setting of it.
DECLARED = (*SETS, *REASONS, "name", "about", "signal_options")
#: Names of the combinators, which no method can have.
COMBINATORS = ("composition", "observe", "within")
#: First parts of metrics that the loss and the trainer report, which no method can have as a name either.
METRICS = (
    *("blocks", "eval", "gradient", "head", "loss", "lr", "optimizer_steps", "ratio", "response", "reward", "rollout"),
    *("sampler", "scorer", "seconds", "tokens"),
)
#: What a method that is only observed reports its trust region as.
_OBSERVED = {"clip", "surrogate"}


def check_class(cls: type) -> None:
    """Refuse a class that cannot be a method.

    Raises:
        MethodError: it has no name, or a declaration is not a set of known names.
    """
    who, name = cls.__qualname__, getattr(cls, "name", None)
    if not (isinstance(name, str) and name):
        raise MethodError(f"{who} has no name. Add a line such as: name = 'my_method'.")
    if not name.isidentifier():
        raise MethodError(
            f"{who} is named {name!r}, expected letters, digits and underscores: it is a part of the names of metrics. "
            f"Give the class another `name`."
        )
    if name in (*COMBINATORS, *METRICS):
        kind = "a combinator is" if name in COMBINATORS else "metrics of the loss or the trainer are"
        raise MethodError(f"{who} is named '{name}', as {kind}. Give the class another `name`.")
    for attribute in SETS:
        value: object = getattr(cls, attribute, frozenset())  # a stage writes no terms
        if not isinstance(value, property):
            check_declared(who, attribute, value)
    for attribute in REASONS:
        value = getattr(cls, attribute, {})
        if isinstance(value, property):
            continue
        if not isinstance(value, Mapping) or not all(isinstance(text, str) for pair in value.items() for text in pair):
            raise MethodError(
                f"{who}: {attribute} = {value!r}, expected reasons by name. Write {attribute} = {{'name': 'why'}}."
            )
    about = getattr(cls, "about", None)
    if not isinstance(about, About):
        raise MethodError(f"{who}: about = {about!r}, expected About. Write about = About(addresses={{'token'}}, ...).")
    unknown = sorted(about.addresses - SOURCES.keys())
    if unknown:
        hint = did_you_mean(unknown[0], SOURCES)
        raise MethodError(f"{who}: about addresses '{unknown[0]}', which does not exist. {hint}")


def check_declared(who: str, attribute: str, value: object) -> None:
    """Refuse a declaration that is not a set of names, or that names something unknown.

    Raises:
        MethodError: with the nearest known name.
    """
    known = SETS[attribute]
    if isinstance(value, str) or not isinstance(value, Set) or not all(isinstance(one, str) for one in value):
        given = [value] if isinstance(value, str) else value if isinstance(value, Iterable) else []
        names = [name for name in given if isinstance(name, str)] or [known[0] if known else "entropies"]
        wanted = "{" + ", ".join(map(repr, names)) + "}"
        raise MethodError(f"{who}: {attribute} = {value!r}, expected a set of names. Write {attribute} = {wanted}.")
    unknown = sorted(value - set(known)) if known else []
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise MethodError(f"{who}: {attribute} names '{unknown[0]}', which does not exist. {hint}")


def checked_stat(who: str, method: str, stat: object) -> Stat:
    """What ``measure`` or ``measure_again`` returned, if it is summaries by name.

    Raises:
        MethodError: it is something else.
    """
    if not isinstance(stat, Mapping):
        raise MethodError(
            f"'{who}': {method} returned {kind_of(stat)}, expected summaries by name. Return for example "
            f"{{'entropy': Mean.of(values)}}, or NOTHING."
        )
    for name, one in stat.items():
        if not isinstance(name, str):
            raise MethodError(
                f"'{who}': {method} returned a summary under {name!r}, which is not a name. Give it a text for a name."
            )
        if not isinstance(one, get_args(Summary)):
            raise MethodError(
                f"'{who}': {method} returned {kind_of(one)} under '{name}', which cannot be merged over parts. Wrap "
                f"it: Mean.of, Pool.top, Pool.quantile or Grouped.of."
            )
    return stat


def check_same(who: str, method: str, stats: Iterable[Stat], without: Stat) -> None:
    """Refuse summaries that differ in name or kind: ranks would wait for each other, or merge what is different.

    Args:
        who: name of the method.
        method: which of its methods measured.
        stats: those of the parts.
        without: those of a batch without tokens, which some rank may have and no other.

    Raises:
        MethodError: names one that is not in both, or not the same in both.
    """
    wanted = {name: _sort(one) for name, one in without.items()}
    for stat in stats:
        found = {name: _sort(one) for name, one in stat.items()}
        if found == wanted:
            continue
        name = min(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        some, none = (f"'{name}' as {one[name]}" if name in one else f"no '{name}'" for one in (found, wanted))
        raise MethodError(
            f"'{who}': {method} returned {some} on a part of the optimizer step, and {none} on one without tokens, "
            f"which a rank may have. Return the same summaries on every part, empty ones where there is nothing."
        )


def check_names(who: str, first: Iterable[str], again: Iterable[str]) -> None:
    """Refuse a summary of the second round that hides one of the first.

    Raises:
        MethodError: names it.
    """
    both = sorted(set(first) & set(again))
    if both:
        raise MethodError(
            f"'{who}': measure and measure_again both returned '{both[0]}', and `advance` and `terms` see only one. "
            f"Give the second another name."
        )


def check_mapping(who: str, method: str, state: object) -> None:
    """Refuse a state that is not a mapping.

    Raises:
        MethodError: names the method that returned it.
    """
    if not isinstance(state, Mapping):
        raise MethodError(f"'{who}': {method} returned {kind_of(state)}. Return the state, a dict, perhaps empty.")


def checked_state(who: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``advance`` returned, if it can be the state of the next optimizer step.

    Raises:
        MethodError: it is not a mapping, or has other keys than the state that it was given.
    """
    check_mapping(who, "advance", after)
    if before.keys() != after.keys():
        lost, new = (sorted(map(str, one)) for one in (before.keys() - after.keys(), after.keys() - before.keys()))
        what = f"dropped '{lost[0]}' from the state" if lost else f"added '{new[0]}' to the state"
        cure = "Return {**state, ...}." if lost else "Give it a first value in init_state."
        raise MethodError(f"'{who}': advance {what}, and a state keeps the keys of init_state. {cure}")
    return after


def check_state(who: str, state: object, initial: object) -> None:
    """Refuse a state that another objective made.

    Raises:
        OutOfRange: names what is missing, or what is there and belongs to no method.
    """
    if not isinstance(initial, Mapping):
        return  # told where the method is asked
    if not isinstance(state, Mapping):
        raise OutOfRange(f"{who} is {kind_of(state)}, expected a mapping. Begin with objective.init_state().")
    for key in initial:
        if key not in state:
            raise OutOfRange(
                f"{who} lacks '{key}': it is of another objective, or of other settings. It has: "
                f"{', '.join(sorted(map(str, state))) or 'nothing'}. Begin with objective.init_state()."
            )
    for key in state:
        if key not in initial:
            raise OutOfRange(
                f"{who} has '{key}', which this objective does not know: it is of another objective. It knows: "
                f"{', '.join(sorted(map(str, initial))) or 'nothing'}. Begin with objective.init_state()."
            )
    for key, first in initial.items():
        if isinstance(first, Mapping):
            check_state(f"{who}['{key}']", state[key], first)


def _sort(one: Summary) -> str:
    """What merges with what: a pool only with one that takes the same order statistic."""
    return f"a Pool({one.rule}, {one.level})" if isinstance(one, Pool) else kind_of(one)


def checked_terms(who: str, terms: object, batch: TokenBatch, writes: Set[str]) -> Terms:
    """What ``terms`` returned, if a loss can be made of it, with its invalid_count counted on the device.

    Its functions are checked too, each time that the loss calls them.

    Raises:
        MethodError: of another type, of a shape or dtype that the field does not have, or not declared.
    """
    if not isinstance(terms, Terms):
        raise MethodError(
            f"'{who}': terms returned {kind_of(terms)}. Return Terms(...), or Terms() to ask for nothing."
        )
    for name, example in (("gates", "Gate(function)"), ("penalties", "Penalty(...)"), ("report", "Mean.of(values)")):
        value = getattr(terms, name)
        if not isinstance(value, Mapping):
            raise MethodError(
                f"'{who}': Terms.{name} is {kind_of(value)}, expected a mapping by name. Write {{'name': {example}}}."
            )
    if who not in COMBINATORS:
        _check_names(who, terms)
    surplus = sorted(terms.filled() - writes)
    if surplus:
        raise MethodError(
            f"'{who}' fills {', '.join(surplus)}, and `writes` names {', '.join(sorted(writes)) or 'nothing'}. Add "
            f"'{surplus[0]}' to `writes`."
        )
    for name in ("keep", "unclipped"):
        _check_bools(f"'{who}': Terms.{name}", getattr(terms, name), batch)
    for name in ("weight", "bonus"):
        _check_floats(f"'{who}': Terms.{name}", getattr(terms, name), batch)
    for name, one in terms.report.items():
        if not isinstance(one, Mean):
            raise MethodError(
                f"'{who}': the metric '{name}' is {kind_of(one)}, which cannot be merged over parts. Write "
                f"Mean.scalar(number), or Mean.of(values)."
            )
    if terms.bounds is not None:
        _check_bounds(f"'{who}': Terms.bounds", terms.bounds, batch)
    if terms.lr_scale is not None and not (_is_number(terms.lr_scale) and 0 <= terms.lr_scale < math.inf):
        raise MethodError(f"'{who}': Terms.lr_scale is {terms.lr_scale!r}, expected a number of at least 0.")
    return replace(
        terms,
        gates={name: _gate(_called(who, "gate", name), one, batch) for name, one in terms.gates.items()},
        penalties={name: _penalty(_called(who, "penalty", name), one, batch) for name, one in terms.penalties.items()},
        ratio=_answering(f"'{who}': Terms.ratio", terms.ratio, "(policy, constants)"),
        surrogate=_surrogate(f"'{who}': Terms.surrogate", terms.surrogate),
        aggregate=_answering(
            f"'{who}': Terms.aggregate", terms.aggregate, "(sequence, counted, num_sequences, totals)"
        ),
        invalid_count=_invalid_count(terms)
        if terms.invalid_count is None
        else terms.invalid_count,  # those of a combinator are counted
    )


def _check_names(who: str, terms: Terms) -> None:
    """Refuse names under which two metrics could meet: each becomes a part of the name of a metric."""
    for field, what in (("gates", "gate"), ("penalties", "penalty"), ("report", "metric")):
        for name in getattr(terms, field):
            if not (isinstance(name, str) and (name.isidentifier() or (name == "" and field != "report"))):
                raise MethodError(
                    f"'{who}': a {what} is named {name!r}, expected letters, digits and underscores. Give it another "
                    f"name."
                )
    taken = {"gate", "stopped"} if "" in terms.gates else set()
    taken |= {"value"} if "" in terms.penalties else set()
    own = {"the gate": _OBSERVED & terms.gates.keys(), "the metric": taken & terms.report.keys()}
    own["the metric"] |= {name for name in terms.report if name.startswith("would_")}
    for what, names in own.items():
        if names:
            raise MethodError(
                f"'{who}': {what} '{min(names)}' has a name that rlstab gives to one of its own. Give it another name."
            )


@dataclass(frozen=True, eq=False)
class _Answering:
    """A function of a method that is held to return one value per token."""

    who: str
    fn: Callable[..., Any]

    def __call__(self, first: Any, *rest: Any) -> Any:
        values = self.fn(first, *rest)
        shape = (first if isinstance(first, Tensor) else first.logprobs).shape
        if not isinstance(values, Tensor):
            raise MethodError(
                f"{self.who} returned {kind_of(values)}. Return a tensor of shape (n,), one value per token."
            )
        if values.shape != shape:
            raise MethodError(
                f"{self.who} returned a tensor of shape {tuple(values.shape)} for {shape[0]} tokens. Return one value "
                f"per token, shape (n,)."
            )
        return values


def _called(who: str, what: str, name: str) -> str:
    return f"'{who}': the {what} '{name}'" if name else f"'{who}': the {what}"


def _answering(who: str, fn: Any, takes: str) -> Any:
    if fn is None or isinstance(fn, _Answering):
        return fn
    if not callable(fn):
        raise MethodError(f"{who} is {kind_of(fn)}, expected a function. Pass one {takes} -> (n,).")
    return _Answering(who, fn)


def _invalid_count(terms: Terms) -> Tensor | None:
    """How many weights are negative, NaN or infinite, bonuses NaN or infinite, bounds negative or NaN; None of none."""
    counts = []
    if terms.weight is not None:
        counts.append((~((terms.weight >= 0) & (terms.weight < math.inf))).count_nonzero())
    if terms.bonus is not None:
        counts.append((~terms.bonus.isfinite()).count_nonzero())
    if terms.bounds is not None:
        sides = [one for one in (terms.bounds.low, terms.bounds.high) if isinstance(one, Tensor)]
        counts += [(~(one >= 0)).count_nonzero() for one in sides]
    return torch.stack(counts).sum() if counts else None


def _check_bools(who: str, values: object, batch: TokenBatch) -> None:
    _check_tokens(
        who, values, batch, "bool", lambda one: one.dtype == torch.bool, "Compare, for example `weights > 0`."
    )


def _check_floats(who: str, values: object, batch: TokenBatch) -> None:
    _check_tokens(who, values, batch, "float", Tensor.is_floating_point, "Convert it with .float().")


def _check_tokens(
    who: str, values: object, batch: TokenBatch, kind: str, fits: Callable[[Tensor], bool], cure: str
) -> None:
    if values is None:
        return
    if not isinstance(values, Tensor):
        raise MethodError(f"{who} is {kind_of(values)}, expected a {kind} tensor of shape (n,), one value per token.")
    if values.shape != batch.logprobs.shape or not fits(values):
        raise MethodError(
            f"{who} is {values.dtype} of shape {tuple(values.shape)}, expected {kind} of shape ({len(batch)},). "
            f"{cure if not fits(values) else 'Give one value per token of the batch.'}"
        )
    if values.device != batch.logprobs.device:
        raise MethodError(
            f"{who} is on {values.device}, and the batch is on {batch.logprobs.device}. Make it from the tensors of "
            f"the "
            f"batch, for example with torch.ones_like(batch.advantages)."
        )
    if values.requires_grad:
        raise MethodError(f"{who} requires grad, and a decision has none. Make it from the evidence of the batch.")


def _gate(who: str, gate: object, batch: TokenBatch) -> Gate:
    if not isinstance(gate, Gate):
        raise MethodError(f"{who} is {kind_of(gate)}. Write Gate(function).")
    _check_bools(f"{who} has a `where` that", gate.where, batch)
    return replace(gate, fn=_answering(who, gate.fn, "(ratio, constants)"))


def _surrogate(who: str, surrogate: object) -> Surrogate | None:
    if surrogate is None:
        return None
    if not isinstance(surrogate, Surrogate):
        raise MethodError(f"{who} is {kind_of(surrogate)}. Write Surrogate(function).")
    return replace(surrogate, fn=_answering(who, surrogate.fn, "(ratio, constants)"))


def _penalty(who: str, penalty: object, batch: TokenBatch) -> Penalty:
    if not isinstance(penalty, Penalty):
        raise MethodError(f"{who} is {kind_of(penalty)}. Write Penalty(coefficient, function).")
    if not (_is_number(penalty.coefficient) and math.isfinite(penalty.coefficient)):
        raise MethodError(f"{who} has the coefficient {penalty.coefficient!r}, expected a finite number.")
    if not isinstance(penalty.reads, Set):
        raise MethodError(
            f"{who} has `reads` that is {kind_of(penalty.reads)}, expected a set of names. Write {{'entropies'}}."
        )
    unknown = sorted(penalty.reads - {"logprobs", *LIVE})
    if unknown:
        raise MethodError(
            f"{who} reads the live '{unknown[0]}', which does not exist. {did_you_mean(unknown[0], LIVE)}"
        )
    _check_bools(f"{who} has a `where` that", penalty.where, batch)
    return replace(penalty, fn=_answering(who, penalty.fn, "(policy, anchor)"))


def _check_bounds(who: str, bounds: object, batch: TokenBatch) -> None:
    if not isinstance(bounds, Bounds):
        raise MethodError(f"{who} is {kind_of(bounds)}. Write Bounds(low, high).")
    for name in ("low", "high"):
        value = getattr(bounds, name)
        if isinstance(value, Tensor):
            _check_floats(f"{who}.{name}", value, batch)
        elif not (_is_number(value) and value >= 0):
            raise MethodError(f"{who}.{name} is {value!r}, expected a number of at least 0, or one per token.")
    if bounds.dual is not None and not (_is_number(bounds.dual) and bounds.dual > 1):
        raise MethodError(f"{who}.dual is {bounds.dual!r}, expected a number above 1, or None.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
