"""Where two methods that look alike differ: ties, values just on a threshold, ratios far from 1 and of exactly 1.

Continuous random numbers meet none of these. A step of :mod:`rlstab.testing.steps` is sharpened here before a law sees
it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlstab.core.objective import TokenObjective
from rlstab.core.settings import settings_of
from rlstab.core.walk import walk
from rlstab.testing.steps import Step, make_step, steps

#: Thresholds that code is fond of, for those that are named neither by a setting nor by a literal.
ROUND = (0.0, 0.5, 1.0, 2.0, 3.0)
#: Not read off one token's own numbers: a copy of a token keeps them.
_OF_THE_ROW = frozenset({"advantages", "truncated", "block_ids"})
#: Two log-probs that methods compare, the minuend first; half of the time those of the ratio.
_PAIRS = (
    ("live", "old_logprobs"),
    ("live", "old_logprobs"),
    ("live", "old_logprobs"),
    ("live", "logprobs"),
    ("logprobs", "old_logprobs"),
    ("logprobs", "ref_logprobs"),
    ("old_logprobs", "rollout_logprobs"),
    ("logprobs", "rollout_logprobs"),
)


def numbers_of(method: TokenObjective) -> tuple[float, ...]:
    """Numbers that a method may compare with: its settings and the literals of its code, at most 24."""
    found: dict[float, None] = {}
    for leaf in walk(method, observed=True):
        for setting in settings_of(type(leaf.method)):
            found.update(dict.fromkeys(_plain_numbers(getattr(leaf.method, setting.name))))
    for leaf in walk(method, observed=True):
        for owner in type(leaf.method).__mro__:
            if not owner.__module__.startswith("rlstab.core"):
                functions = [one for one in vars(owner).values() if hasattr(one, "__code__")]
                found.update(dict.fromkeys(number for one in functions for number in _literals(one)))
    return tuple(found)[:24]


def _literals(function: Any) -> Iterator[float]:
    """Numbers in the code of a function, in functions inside of it, and in globals that it names."""
    pending: list[CodeType] = [function.__code__]
    while pending:
        code = pending.pop()
        for one in code.co_consts:
            if isinstance(one, CodeType):
                pending.append(one)
            else:
                yield from _plain_numbers(one)
        for name in code.co_names:
            yield from _plain_numbers(function.__globals__.get(name))


def _plain_numbers(value: object) -> Iterator[float]:
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, int | float) and not isinstance(one, bool) and (one == 0 or 1e-6 <= abs(one) <= 1e3):
            yield float(one)


@st.composite
def sharp_steps(
    draw: st.DrawFn, extra: Sequence[str] = (), numbers: Sequence[float] = (), *, exact: bool = True
) -> Step:
    """Drawn optimizer steps, sharpened; ``extra`` as in :func:`steps`, the rest as in :func:`sharpened`."""
    return sharpened(draw(steps(extra)), draw(st.integers(0, 2**32 - 1)), numbers, exact=exact)


def rich_step(number: int, extra: Sequence[str], numbers: Sequence[float], *, exact: bool, extreme: bool) -> Step:
    """One of the optimizer steps with which every law begins: eight responses, and a bit of everything."""
    step = make_step("mixed", [5, 1, 8, 3, 8, 2, 6, 4], 2, number, extra, extreme=extreme)
    return step if extreme else sharpened(step, number, numbers, exact=exact)


def sharpened(step: Step, seed: int, numbers: Iterable[float] = (), *, exact: bool = True) -> Step:
    """The step with some tokens alike, some far off policy, some exactly on it, and some exactly on thresholds.

    Args:
        step: with continuous random numbers.
        seed: of all choices.
        numbers: thresholds to place values on.
        exact: place them; a threshold and its value may fall on different sides in another precision.
    """
    if not len(step):
        return step
    draw = random.Random(seed)
    values = {name: list(map(float, one)) for name, one in step.evidence.items()}
    live = {name: list(map(float, one)) for name, one in step.live.items()}
    columns = {**values, **{f"live {name}": one for name, one in live.items()}, "live": live["logprobs"]}
    rows: dict[int, list[int]] = {}
    for place, row in enumerate(step.sequence.tolist()):
        rows.setdefault(row, []).append(place)
    if draw.random() < 0.6:
        _twins(draw, columns, rows)
    for place in range(len(step)):
        if draw.random() < 0.3:
            _apart(draw, columns, place)
    thresholds = [*numbers, *numbers, *ROUND]
    if exact:
        for place in range(len(step)):
            if draw.random() < 0.35:
                _hit(draw, columns, [place], draw.choice(thresholds))
        for places in rows.values():
            if draw.random() < 0.2:
                _hit(draw, columns, places, draw.choice(thresholds))

    likeliest = zip(values["max_logprobs"], values["logprobs"], strict=True)
    values["max_logprobs"] = [max(pair) for pair in likeliest]

    def back(columns: dict[str, list[float]]) -> dict[str, Tensor]:
        return {name: torch.tensor(one, dtype=torch.float64) for name, one in columns.items()}

    labels = draw.sample(range(5, 500), int(step.group_ids.max()) + 1)  # the number of a group is no place in a list
    group_ids = torch.tensor(labels, dtype=torch.int64)[step.group_ids]
    return replace(step, evidence=back(values), live=back(live), group_ids=group_ids)


def _twins(draw: random.Random, columns: dict[str, list[float]], rows: dict[int, list[int]]) -> None:
    """Most tokens become copies of a few, in whatever they are compared by; some miss that by a ten-thousandth."""
    count = len(columns["live"])
    models = [draw.randrange(count) for _ in range(draw.randint(2, 4))]
    kept = {name: [one[model] for model in models] for name, one in columns.items()}
    few = [draw.choice([-1.0, -0.5, 0.5, 1.0]) for _ in range(2)]
    for places in rows.values():
        if draw.random() < 0.7:
            advantage = draw.choice(few)
            for place in places:
                columns["advantages"][place] = advantage
    for place in range(count):
        if draw.random() < 0.75:
            model, also_live, near = draw.randrange(len(models)), draw.random() < 0.5, draw.random() < 0.2
            factor = 1 + 1e-4 * draw.choice([-1, 1]) if near else 1.0
            for name, one in columns.items():
                if name not in _OF_THE_ROW and (also_live or not name.startswith("live")):
                    one[place] = kept[name][model] * factor


def _apart(draw: random.Random, columns: dict[str, list[float]], place: int) -> None:
    """Two policies that agree to the bit on a token, or differ by a factor of up to a thousand."""
    one, other = draw.choice(_PAIRS)
    gap = 0.0 if draw.random() < 0.4 else draw.uniform(-6.9, 6.9)
    _set_gap(columns, one, other, place, gap)


def _set_gap(columns: dict[str, list[float]], one: str, other: str, place: int, gap: float) -> None:
    """``one - other`` is ``gap`` to the bit: one of the two is 0, or they are the same."""
    if gap == 0:
        columns[one][place] = columns[other][place]
    else:
        columns[one][place], columns[other][place] = (0.0, -gap) if gap > 0 else (gap, 0.0)


def _hit(draw: random.Random, columns: dict[str, list[float]], places: list[int], number: float) -> None:
    """Some quantity of these tokens is ``number`` to the bit, or just beside it."""
    if draw.random() < 0.3:
        number *= 1 + draw.choice([-1e-4, -1e-9, 1e-9, 1e-4])
    if draw.random() < 0.5:
        one, other = draw.choice(_PAIRS)
        ratio = draw.choice([number, 1 + number, 1 - number])
        gap = draw.choice([number, -number]) if draw.random() < 0.3 or not 1e-3 <= ratio <= 1e3 else _log(ratio)
        if abs(gap) < 20:
            for place in places:
                _set_gap(columns, one, other, place, gap)
        return
    options: list[tuple[str, float]] = [("advantages", number), ("advantages", -number)]
    options += [(name, number) for name in columns if name in ("entropies", "live entropies") and number >= 0]
    options += [("sum_p_sq", number), ("logprobs", _log(number))] if 0 < number <= 1 else []
    options += [("max_logprobs", _log(number)), ("log_kept_mass", _log(number))] if 0 < number <= 1 else []
    options += [("logprobs", -abs(number)), ("old_logprobs", -abs(number))]
    options += [(name, number) for name in columns if name not in _KNOWN]
    name, value = draw.choice(options)
    if abs(value) < 80:
        for place in places:
            columns[name][place] = value


_KNOWN = frozenset(
    "advantages entropies sum_p_sq logprobs old_logprobs ref_logprobs rollout_logprobs max_logprobs log_kept_mass "
    "truncated block_ids live".split()
) | {"live logprobs", "live entropies", "live log_kept_mass"}


def _log(number: float) -> float:
    """The logarithm, or a neighbour of it whose exponential is ``number`` to the bit, by Python and by torch."""
    middle = math.log(number)
    for one in (middle, math.nextafter(middle, 1e9), math.nextafter(middle, -1e9)):
        if math.exp(one) == number and bool((torch.full((9,), one, dtype=torch.float64).exp() == number).all()):
            return one
    return middle


def stretched(step: Step) -> Step:
    """The step with values that drawn ones seldom reach: what limits its inputs limits these."""
    found = dict(step.evidence)
    found["advantages"] = found["advantages"] * 1e3
    for name in ("entropies", "sum_p_sq"):
        found[name] = found[name] * 10
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs", "max_logprobs", "log_kept_mass"):
        found[name] = found[name] * 20
    return replace(step, evidence=found)
