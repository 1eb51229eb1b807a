"""What ``terms`` returned, checked without waiting for a device: its tensors now, its functions when they are "
"called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.contract import COMBINATORS, LIVE
from rlstab.core.stats import Mean
from rlstab.core.terms import Bounds, Gate, Penalty, Pull, Terms
from rlstab.errors import MethodError, did_you_mean, kind_of

#: What a method that is only observed reports its trust region as.
_OBSERVED = {"clip", "pull"}


def checked_terms(who: str, terms: object, batch: TokenBatch, writes: Set[str]) -> Terms:
    """What ``terms`` returned, if a loss can be made of it, with its misfits counted on the device.

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
    for name in ("keep", "exempt"):
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
        ratio=_answering(f"'{who}': Terms.ratio", terms.ratio, "(policy, held)"),
        pull=_pull(f"'{who}': Terms.pull", terms.pull),
        aggregate=_answering(
            f"'{who}': Terms.aggregate", terms.aggregate, "(sequence, counted, num_sequences, totals)"
        ),
        misfits=_misfits(terms) if terms.misfits is None else terms.misfits,  # those of a combinator are counted
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


def _misfits(terms: Terms) -> Tensor | None:
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
    return replace(gate, fn=_answering(who, gate.fn, "(ratio, held)"))


def _pull(who: str, pull: object) -> Pull | None:
    if pull is None:
        return None
    if not isinstance(pull, Pull):
        raise MethodError(f"{who} is {kind_of(pull)}. Write Pull(function).")
    return replace(pull, fn=_answering(who, pull.fn, "(ratio, held)"))


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
