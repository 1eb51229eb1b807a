"""Whether methods fit together: checked when they are composed, and once more when a loss is made."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations

from rlstab.core.contract import SETS, check_dataclass, check_declared
from rlstab.core.objective import TokenObjective
from rlstab.core.terms import SLOTS, WRITABLE, two_owners
from rlstab.errors import Conflict, FitWarning, MethodError, kind_of


def check_methods(caller: str, given: Sequence[object]) -> None:
    """Refuse what is not a method.

    Raises:
        MethodError: with what to write instead.
    """
    for one in given:
        if isinstance(one, TokenObjective):
            check_dataclass(type(one))
            for attribute in SETS:
                check_declared(type(one).__qualname__, attribute, getattr(one, attribute))
            continue
        if isinstance(one, type) and issubclass(one, TokenObjective):
            text = f"{caller} was given the class {one.__name__}. Make a method of it: {one.__name__}()."
        elif isinstance(one, Iterable) and not isinstance(one, str | Mapping):
            several = "Spread it: compose(*methods)" if caller == "compose" else "Compose it first: compose(*methods)"
            text = f"{caller} was given {kind_of(one)}. {several}."
        elif isinstance(getattr(one, "objective", None), TokenObjective):
            text = f"{caller} was given {kind_of(one)}. Pass its objective: preset('...').objective."
        elif isinstance(one, str):
            text = (
                f"{caller} was given the name '{one}'. Write load_objective([{{'name': '{one}'}}]), or make the method."
            )
        else:
            text = f"{caller} was given {kind_of(one)}, which is no TokenObjective. Derive its class from it."
        raise MethodError(text)


def check_fit(keyed: Mapping[str, TokenObjective]) -> None:
    """Check members that act side by side.

    Raises:
        Conflict: two own one slot, define one signal differently, or exclude each other; names both, and the fix.
    """
    owner: dict[str, str] = {}
    for key, method in keyed.items():
        for slot in sorted(method.writes & set(SLOTS)):
            if slot in owner:
                raise two_owners(owner[slot], key, slot)
            owner[slot] = key
    options: dict[str, tuple[str, float]] = {}
    for key, method in keyed.items():
        for name, value in method.signal_options.items():
            if name in options and options[name][1] != value:
                raise Conflict(
                    f"'{options[name][0]}' and '{key}' read one signal defined with different numbers: {name} = "
                    f"{options[name][1]} and {value}.\n  Give both the same {name}."
                )
            options[name] = key, value
    for one, other in permutations([leaf for method in keyed.values() for leaf in method.acting()], 2):
        why = next((one.excludes[key] for key in one.excludes if key == other.name or key in other.writes), None)
        if why is None and "pull" in one.writes and "bounds" in other.writes:
            why = (
                f"'{one.name}' says with what a token pulls instead of its ratio, and a trust region bounds the ratio."
            )
        if why is not None:
            raise Conflict(f"'{one.name}' and '{other.name}' exclude each other: {why}\n  Remove one of them.")


def check_complete(objective: TokenObjective) -> None:
    """Check that what members require is there: when a loss is made, because a composition may grow until then.

    What they only expect is told by a :class:`FitWarning`.

    Raises:
        Conflict: names the method, what it lacks, and why.
    """
    acting = list(objective.acting())
    for name, what, why in _missing(acting, "requires"):
        raise Conflict(f"'{name}' needs {what} beside it: {why}\n  Add it, or remove '{name}'.")
    for text in unmet(objective):
        warnings.warn(text, FitWarning, stacklevel=3)


@contextmanager
def no_fit_warnings() -> Iterator[None]:
    """For a method that is tried alone, and where :func:`unmet` is told in another way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FitWarning)
        yield


def unmet(objective: TokenObjective) -> list[str]:
    """A sentence for each method that is there without what it was published with."""
    return [
        f"'{name}' expects {what} beside it, which is missing: {why}"
        for name, what, why in _missing(list(objective.acting()), "expects")
    ]


def _missing(acting: Sequence[TokenObjective], attribute: str) -> Iterator[tuple[str, str, str]]:
    """Name of the method, what is not there, and why it should be."""
    names = {one.name for one in acting}
    written = frozenset().union(*(one.writes for one in acting))  # by what acts: an observed gate is none
    for one in acting:
        for wanted, why in getattr(one, attribute).items():
            if wanted not in (written if wanted in WRITABLE else names):
                yield one.name, f"a method that writes '{wanted}'" if wanted in WRITABLE else f"'{wanted}'", why
