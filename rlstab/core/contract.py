"""What a method has to be, checked when its class is created and when it returns, without waiting for a device.

Each error names the method and ends with the fix. The laws of :mod:`rlstab.testing` check what only a run can show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.stats import Mean, Stat, Summary
from rlstab.core.terms import WRITABLE, Bounds, Gate, Penalty, Terms
from rlstab.errors import MethodError, OutOfRange, did_you_mean

#: How far one policy has moved from another: what a method may say that it reads.
DRIFT: Mapping[str, str] = {
    "live": "the live policy from `old_logprobs`: the ratio",
    "step": "the policy at the start of the optimizer step, `logprobs`, from `old_logprobs`",
    "sampler": "`old_logprobs` from `rollout_logprobs`, what the sampler reported",
}


def check_class(cls: type) -> None:
    """Refuse a class that cannot be a method.

    Raises:
        MethodError: it has no name, or a declaration is not a set of known names.
    """
    who = cls.__qualname__
    if not isinstance(getattr(cls, "name", None), str):
        raise MethodError(f"{who} has no name. Add a line such as: name: ClassVar[str] = 'my_method'.")
    for attribute in ("needs", "live_needs", "writes", "reads_drift"):
        value = getattr(cls, attribute)
        if not isinstance(value, property):
            check_declared(who, attribute, value)


def check_declared(who: str, attribute: str, value: object) -> None:
    """Refuse a declaration that is not a set of names, or that names something unknown.

    Raises:
        MethodError: with the nearest known name.
    """
    if isinstance(value, str) or not isinstance(value, Set) or not all(isinstance(one, str) for one in value):
        raise MethodError(
            f"{who}: {attribute} = {value!r}, expected a set of names. Write {attribute} = frozenset({{'entropies'}})."
        )
    known = {"writes": WRITABLE, "reads_drift": tuple(DRIFT)}.get(attribute)
    unknown = sorted(value - set(known)) if known else []
    if known and unknown:
        gate = "A surrogate is written as a gate: see Gate." if unknown[0] == "surrogate" else ""
        hint = gate or did_you_mean(unknown[0], known)
        raise MethodError(f"{who}: {attribute} names '{unknown[0]}', which does not exist. {hint}")


def checked_stat(who: str, method: str, stat: object) -> Stat:
    """What ``measure`` or ``measure_again`` returned, if it is summaries by name.

    Raises:
        MethodError: it is something else.
    """
    if not isinstance(stat, Mapping):
        raise MethodError(
            f"'{who}': {method} returned {_kind(stat)}, expected summaries by name. Return for example "
            f"{{'entropy': Mean.of(values)}}, or NOTHING."
        )
    for name, one in stat.items():
        if not isinstance(one, get_args(Summary)):
            raise MethodError(
                f"'{who}': {method} returned {_kind(one)} under '{name}', which cannot be merged over parts. Wrap it: "
                f"Mean.of, Pool.top, Pool.quantile or Grouped.of."
            )
    return stat


def checked_terms(who: str, terms: object, batch: TokenBatch, writes: Set[str]) -> Terms:
    """What ``terms`` returned, if a loss can be made of it, with its misfits counted on the device.

    Raises:
        MethodError: of another type, of a shape or dtype that the field does not have, or not declared.
    """
    if not isinstance(terms, Terms):
        raise MethodError(f"'{who}': terms returned {_kind(terms)}. Return Terms(...), or Terms() to ask for nothing.")
    surplus = sorted(terms.filled() - writes)
    if surplus:
        raise MethodError(
            f"'{who}' fills {', '.join(surplus)}, and `writes` names {', '.join(sorted(writes)) or 'nothing'}. Add "
            f"'{surplus[0]}' to `writes`."
        )
    for name in ("keep", "exempt"):
        _check_tokens(
            f"'{who}': Terms.{name}", getattr(terms, name), batch, "bool", lambda one: one.dtype == torch.bool
        )
    for name in ("weight", "bonus"):
        _check_tokens(f"'{who}': Terms.{name}", getattr(terms, name), batch, "float", Tensor.is_floating_point)
    for name, penalty in terms.penalties.items():
        _check_penalty(f"'{who}': the penalty '{name}'", penalty, batch)
    for name, gate in terms.gates.items():
        if not isinstance(gate, Gate):
            raise MethodError(f"'{who}': the gate '{name}' is {_kind(gate)}. Write Gate(function).")
    for name, one in terms.report.items():
        if not isinstance(one, Mean):
            raise MethodError(
                f"'{who}': the metric '{name}' is {_kind(one)}, which cannot be merged over parts. Write "
                f"Mean.scalar(number), or Mean.of(values)."
            )
    if terms.bounds is not None:
        _check_bounds(f"'{who}': Terms.bounds", terms.bounds, batch)
    if terms.lr_scale is not None and not (_is_number(terms.lr_scale) and 0 <= terms.lr_scale < math.inf):
        raise MethodError(f"'{who}': Terms.lr_scale is {terms.lr_scale!r}, expected a number of at least 0.")
    return terms if terms.misfits is not None else replace(terms, misfits=_misfits(terms))  # of a combinator: counted


def check_state(who: str, state: object, initial: object) -> None:
    """Refuse a state that another objective made.

    Raises:
        OutOfRange: names what is missing.
    """
    if not isinstance(state, Mapping):
        raise OutOfRange(f"{who} is {_kind(state)}, expected a mapping. Begin with objective.init_state().")
    assert isinstance(initial, Mapping)
    for key, first in initial.items():
        if key not in state:
            raise OutOfRange(
                f"{who} lacks '{key}': it is of another objective, or of other settings. It has: "
                f"{', '.join(sorted(map(str, state))) or 'nothing'}. Begin with objective.init_state()."
            )
        if isinstance(first, Mapping):
            check_state(f"{who}['{key}']", state[key], first)


def _misfits(terms: Terms) -> Tensor | None:
    """How many weights are negative, NaN or infinite, and how many bonuses NaN or infinite; None where neither is."""
    counts = []
    if terms.weight is not None:
        counts.append((~((terms.weight >= 0) & (terms.weight < math.inf))).count_nonzero())
    if terms.bonus is not None:
        counts.append((~terms.bonus.isfinite()).count_nonzero())
    return torch.stack(counts).sum() if counts else None


def _check_tokens(who: str, values: object, batch: TokenBatch, kind: str, fits: Callable[[Tensor], bool]) -> None:
    if values is None:
        return
    if not isinstance(values, Tensor):
        raise MethodError(f"{who} is {_kind(values)}, expected a {kind} tensor of shape (n,), one value per token.")
    if values.shape != batch.logprobs.shape or not fits(values):
        cure = "Compare, for example `weights > 0`." if kind == "bool" else "Convert it with .float()."
        raise MethodError(
            f"{who} is {values.dtype} of shape {tuple(values.shape)}, expected {kind} of shape ({len(batch)},). "
            f"{cure if not fits(values) else 'Give one value per token of the batch.'}"
        )
    if values.requires_grad:
        raise MethodError(f"{who} requires grad, and a decision has none. Make it from the evidence of the batch.")


def _check_penalty(who: str, penalty: object, batch: TokenBatch) -> None:
    if not isinstance(penalty, Penalty):
        raise MethodError(f"{who} is {_kind(penalty)}. Write Penalty(coefficient, function).")
    if not (_is_number(penalty.coefficient) and math.isfinite(penalty.coefficient)):
        raise MethodError(f"{who} has the coefficient {penalty.coefficient!r}, expected a finite number.")
    _check_tokens(f"{who}, where", penalty.where, batch, "bool", lambda one: one.dtype == torch.bool)


def _check_bounds(who: str, bounds: object, batch: TokenBatch) -> None:
    if not isinstance(bounds, Bounds):
        raise MethodError(f"{who} is {_kind(bounds)}. Write Bounds(low, high).")
    for name in ("low", "high"):
        value = getattr(bounds, name)
        if isinstance(value, Tensor):
            _check_tokens(f"{who}.{name}", value, batch, "float", Tensor.is_floating_point)
        elif not (_is_number(value) and value >= 0):
            raise MethodError(f"{who}.{name} is {value!r}, expected a number of at least 0, or one per token.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
