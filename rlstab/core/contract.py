"""What a method has to be, checked when its class is created and when it returns, without waiting for a device.

Each error names the method and ends with the fix. The laws of :mod:`rlstab.testing` check what only a run can show.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Set
from dataclasses import is_dataclass
from typing import Any, get_args

from rlstab.core.facts import SOURCES
from rlstab.core.settings import check_settings
from rlstab.core.stats import Pool, Stat, Summary
from rlstab.core.terms import WRITABLE
from rlstab.errors import MethodError, OutOfRange, did_you_mean, kind_of

#: How far one policy has moved from another: what a method may say that it reads.
DRIFT: Mapping[str, str] = {
    "live": "the live policy from `old_logprobs`: the ratio",
    "step": "the policy at the start of the optimizer step, `logprobs`, from `old_logprobs`",
    "sampler": "`old_logprobs` from `rollout_logprobs`, what the sampler reported",
    "start": "the policy at the start of the optimizer step, `logprobs`, from `rollout_logprobs`",
}
#: Outputs of the live policy that a penalty may differentiate beyond the log-probs.
LIVE = ("entropies", "log_kept_mass")
#: Evidence that every batch has and not every method reads. A host that makes it for nobody wastes a forward.
BASICS = ("logprobs", "old_logprobs")
#: What a method declares as sets of names, with the known names, where only some are.
SETS: Mapping[str, tuple[str, ...]] = {
    "needs": (),
    "reads_policies": BASICS,
    "live_needs": LIVE,
    "writes": WRITABLE,
    "reads_drift": tuple(DRIFT),
    "addresses": tuple(SOURCES),
}
#: What a method declares as reasons by name.
REASONS = ("exceptions", "excludes", "requires", "expects")
#: Names of the combinators, which no method can have.
COMBINATORS = ("composition", "observe", "within")
#: First parts of metrics that the loss and the trainer report, which no method can have as a name either.
METRICS = (
    *("blocks", "eval", "gradient", "head", "loss", "lr", "optimizer_steps", "ratio", "response", "reward", "rollout"),
    *("sampler", "scorer", "seconds", "tokens"),
)


def check_class(cls: type) -> None:
    """Refuse a class that cannot be a method.

    Raises:
        MethodError: it has no name, or a declaration is not a set of known names.
    """
    who, name = cls.__qualname__, getattr(cls, "name", None)
    if not (isinstance(name, str) and name):
        raise MethodError(f"{who} has no name. Add a line such as: name: ClassVar[str] = 'my_method'.")
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
        if not isinstance(value, Mapping) or not all(isinstance(one, str) for pair in value.items() for one in pair):
            raise MethodError(
                f"{who}: {attribute} = {value!r}, expected reasons by name. Write {attribute} = {{'name': 'why'}}."
            )


def check_declared(who: str, attribute: str, value: object) -> None:
    """Refuse a declaration that is not a set of names, or that names something unknown.

    Raises:
        MethodError: with the nearest known name.
    """
    known = SETS[attribute]
    if isinstance(value, str) or not isinstance(value, Set) or not all(isinstance(one, str) for one in value):
        given = [value] if isinstance(value, str) else value if isinstance(value, Iterable) else []
        names = [one for one in given if isinstance(one, str)] or [known[0] if known else "entropies"]
        wanted = "{" + ", ".join(map(repr, names)) + "}"
        raise MethodError(
            f"{who}: {attribute} = {value!r}, expected a set of names. Write {attribute} = frozenset({wanted})."
        )
    unknown = sorted(value - set(known)) if known else []
    if unknown:
        gate = "A surrogate is written as a gate: see Gate." if unknown[0] == "surrogate" else ""
        hint = gate or did_you_mean(unknown[0], known)
        raise MethodError(f"{who}: {attribute} names '{unknown[0]}', which does not exist. {hint}")


def check_made(method: object, name: str) -> None:
    """Check a method when it is made: its class as a dataclass, and its settings.

    Raises:
        MethodError: see :func:`check_dataclass`; or a setting has a type that YAML cannot hold.
        OutOfRange: a setting has a value that is not allowed.
    """
    check_dataclass(type(method))
    check_settings(method, name)


def check_dataclass(cls: type) -> None:
    """Refuse a class whose settings would not be seen, or could change after a method was made.

    Raises:
        MethodError: it is no frozen dataclass, or declares what belongs to the class as a setting.
    """
    who = cls.__qualname__
    if not is_dataclass(cls):
        raise MethodError(
            f"{who} is no dataclass, so it has no settings. Write @dataclass(frozen=True) above the class."
        )
    if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # every dataclass has it
        raise MethodError(
            f"{who} is not frozen: its settings could change after they were checked, and after a run was named by "
            f"them. Write @dataclass(frozen=True) above the class."
        )
    for one in dataclasses.fields(cls):
        if one.name in (*SETS, *REASONS, "name", "limits", "interacts", "signal_options"):
            raise MethodError(
                f"{who} annotates `{one.name}`, which makes a setting of it. Write `{one.name} = ...` without an "
                f"annotation, or with ClassVar."
            )
    if "__dataclass_params__" not in vars(cls):  # it inherits from a dataclass
        own = [name for name, hint in inspect.get_annotations(cls).items() if "ClassVar" not in str(hint)]
        if own:
            raise MethodError(
                f"{who} is no dataclass of its own, so `{own[0]}` is no setting. Write @dataclass(frozen=True) above "
                f"the class."
            )


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
                f"'{who}': {method} returned a summary under {name!r}, which is no name. Give it a text for a name."
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
    """Refuse a state that is no mapping.

    Raises:
        MethodError: names the method that returned it.
    """
    if not isinstance(state, Mapping):
        raise MethodError(f"'{who}': {method} returned {kind_of(state)}. Return the state, a dict, perhaps empty.")


def checked_state(who: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``advance`` returned, if it can be the state of the next optimizer step.

    Raises:
        MethodError: it is no mapping, or has other keys than the state that it was given.
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
