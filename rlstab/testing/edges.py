"""Edge cases in which similar methods differ: ties, values exactly on a threshold, ratios far from 1 and of exactly 1.

Continuous random numbers hit none of these. A step of :mod:`rlstab.testing.steps` is sharpened here before a law sees
it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from rlstab import TokenObjective
from rlstab.core.batch import MARKS
from rlstab.core.method import Method
from rlstab.core.method_settings import settings_of
from rlstab.testing.fresh_process import methods_of
from rlstab.testing.steps import LOGS, Step, in_domain, make_step

#: Thresholds that are common in code, for methods without a setting or literal.
ROUND = (0.0, 0.5, 1.0, 2.0, 3.0)
#: Numbers by name, one for each token.
Columns: TypeAlias = dict[str, list[float]]

#: Quantities that do not follow from one token's numbers: a copy of a token keeps them.
_OF_THE_ROW = frozenset({"advantages", "truncated", "lag", "block_ids"})
#: Two log-probs that methods compare, the minuend first; the first is the ratio's.
_PAIRS = (
    ("live", "old_logprobs"),
    ("live", "logprobs"),
    ("live", "ref_logprobs"),
    ("logprobs", "old_logprobs"),
    ("logprobs", "ref_logprobs"),
    ("old_logprobs", "rollout_logprobs"),
    ("logprobs", "rollout_logprobs"),
    ("teacher_logprobs", "old_logprobs"),
)


def numbers_of(method: TokenObjective) -> tuple[float, ...]:
    """Numbers that a method may compare values with: its settings and the literals of its code, at most 24."""
    methods: list[TokenObjective] = methods_of(method)
    values = [getattr(part, setting.name) for part in methods for setting in settings_of(type(part))]
    for part in methods:
        for code, named in _code_of(part):
            if not named["__name__"].startswith("rlstab.core."):
                values += [*code.co_consts, *map(named.get, code.co_names)]
    return tuple(dict.fromkeys(number for value in values for number in _plain_numbers(value)))[:24]


def words_of(method: Method[Any]) -> frozenset[str]:
    """Names and texts in the code of a method or stage and of the functions that it calls, keywords included."""
    words: set[str] = set()
    for code, _ in _code_of(method):
        words.update(code.co_names)
        for constant in code.co_consts:
            words.update(
                word for word in (constant if isinstance(constant, tuple) else (constant,)) if type(word) is str
            )
    return frozenset(words)


def _code_of(method: Method[Any]) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """The code of a method's classes outside the core and of functions that it names, each with its globals."""
    classes = [cls for cls in type(method).__mro__ if not cls.__module__.startswith(("rlstab.core.", "abc", "typing"))]
    members = [member for cls in classes for member in vars(cls).values()]
    functions = [getattr(member, "__func__", getattr(member, "fget", member)) for member in members]
    pending = [
        (function.__code__, function.__globals__) for function in functions if isinstance(function, FunctionType)
    ]
    visited: set[CodeType] = set()
    while pending:
        code, named = pending.pop()
        if code in visited:
            continue
        visited.add(code)
        yield code, named
        pending += [(inner, named) for inner in code.co_consts if isinstance(inner, CodeType)]
        callees = [function for function in map(named.get, code.co_names) if isinstance(function, FunctionType)]
        pending += [(function.__code__, function.__globals__) for function in callees]


def _plain_numbers(value: object) -> Iterator[float]:
    for number in value if isinstance(value, tuple) else (value,):
        plain = isinstance(number, int | float) and not isinstance(number, bool)
        if plain and (number == 0 or 1e-6 <= abs(number) <= 1e3):
            yield float(number)


@dataclass(frozen=True)
class Edge:
    """A quantity of a token that can be put on a number to the bit: ``name - less``, or ``name`` alone."""

    name: str
    less: str | None
    value: float

    def put(self, columns: Columns, token: int) -> None:
        """Put the quantity on the number."""
        if self.less is None:
            columns[self.name][token] = self.value
        elif self.value == 0:
            columns[self.name][token] = columns[self.less][token]
        else:  # where one of the two is 0, their difference is not rounded
            gap = self.value
            columns[self.name][token], columns[self.less][token] = (0.0, -gap) if gap > 0 else (gap, 0.0)


def edges_of(method: TokenObjective) -> Iterator[Edge]:
    """The quantities that a method may compare, with all numbers that it may compare them with."""
    needs = method.needs
    read = {"live", "old_logprobs", "logprobs", *needs}
    extra = needs - method.known_needs - method.always
    plain = [name for name in ("entropies", *sorted(extra)) if name in needs]
    plain += [f"live {name}" for name in sorted(method.live_needs)]
    for number in dict.fromkeys([*numbers_of(method), *ROUND]):
        gaps = {number, -number} | {_log(ratio) for ratio in (number, 1 + number, 1 - number) if 1e-3 <= ratio <= 1e3}
        for pair in _PAIRS:
            if read.issuperset(pair):
                yield from (Edge(*pair, gap) for gap in sorted(gaps) if abs(gap) < 20)
        yield from (Edge("advantages", None, value) for value in {number, -number})
        yield from (Edge(name, None, number) for name in plain if number >= 0 or name in extra)
        logs = {-abs(number)} | ({_log(number)} if 0 < number <= 1 else set())
        for name in ("logprobs", "old_logprobs", *sorted({"max_logprobs", "log_kept_mass"} & needs)):
            yield from (Edge(name, None, value) for value in sorted(logs) if -80 < value <= 0)
        if "sum_p_sq" in needs and 0 < number <= 1:
            yield Edge("sum_p_sq", None, number)


def rich_step(number: int, extra: Sequence[str], edges: Sequence[Edge], *, extreme: bool = False) -> Step:
    """One of the optimizer steps with which laws begin: eight responses with some of everything.

    Together, the first ``count(edges)`` of them have all edges.
    """
    step = make_step("mixed", RICH, 2, number, extra, extreme=extreme)
    spread = random.Random(1).sample(edges, len(edges))
    return step if extreme else sharpened(step, number, spread[number % count(edges) :: count(edges)], alike=1.0)


#: Lengths of the responses of a rich step.
RICH = (7, 1, 10, 4, 11, 3, 8, 6)
#: Number of edges that fit into one of them.
_ROOM = 30


def count(edges: Sequence[Edge]) -> int:
    """The number of rich steps that the edges need."""
    return max(1, -(-len(edges) // _ROOM))


def sharpened(step: Step, seed: int, edges: Sequence[Edge] = (), *, alike: float = 0.6) -> Step:
    """The step with some tokens alike, some far off policy, some exactly on it, and some exactly on thresholds.

    Args:
        step: with continuous random numbers.
        seed: the seed of all choices.
        edges: to put tokens on, each on one as far as there are tokens with an advantage, and the others just next to
            one. Without any, ratios stay moderate too: a threshold and its value may fall on different sides in another
            precision, and what is small vanishes there.
        alike: the chance that most tokens are copies of a few.
    """
    if not len(step):
        return step
    draw = random.Random(seed)
    values, live = ({name: column.tolist() for name, column in side.items()} for side in (step.evidence, step.live))
    columns = {**values, **{f"live {name}": column for name, column in live.items()}, "live": live["logprobs"]}
    rows: dict[int, list[int]] = {}
    for token, row in enumerate(step.sequence.tolist()):
        rows.setdefault(row, []).append(token)
    if draw.random() < alike:
        _make_alike(draw, columns, rows)
    far = 6.9 if edges else 0.9
    for token in range(len(step)):
        if draw.random() < 0.3:  # two policies agree to the bit on a token, or differ by a factor of up to a thousand
            gap = 0.0 if draw.random() < 0.4 else draw.uniform(-far, far)
            Edge(*draw.choice((_PAIRS[0], *_PAIRS)), gap).put(columns, token)
    for tokens in rows.values():
        if edges and draw.random() < 0.2:
            edge = draw.choice(edges)
            for token in tokens:
                edge.put(columns, token)
        else:
            Edge(*_PAIRS[0], 0.0).put(columns, tokens[0])
    pulling = [token for token in range(len(step)) if values["advantages"][token] != 0]
    for number, token in enumerate(draw.sample(pulling, len(pulling)) if edges else ()):
        edge = edges[number % len(edges)]
        factor = 1.0 if number < len(edges) else 1 + draw.choice([-1e-4, -1e-9, 1e-9, 1e-4])
        replace(edge, value=edge.value * factor).put(columns, token)
    values["max_logprobs"] = list(map(max, values["max_logprobs"], values["logprobs"]))

    def back(columns: Columns) -> dict[str, Tensor]:
        return {name: in_domain(name, torch.tensor(column, dtype=torch.float64)) for name, column in columns.items()}

    # the number of a group is not an index into a list
    labels = torch.tensor(draw.sample(range(5, 500), int(step.group_ids.max()) + 1))
    return replace(step, evidence=back(values), live=back(live), group_ids=labels[step.group_ids])


def _make_alike(draw: random.Random, columns: Columns, rows: dict[int, list[int]]) -> None:
    """Make most tokens copies of a few, in all compared quantities; some differ by a ten-thousandth."""
    count = len(columns["live"])
    tokens_copied = [draw.randrange(count) for _ in range(draw.randint(2, 4))]
    models = [{name: column[token] for name, column in columns.items()} for token in tokens_copied]
    for tokens in rows.values():
        if draw.random() < 0.7:
            advantage = draw.choice([-1.0, -0.5, 0.5, 1.0])
            for token in tokens:
                columns["advantages"][token] = advantage
    for token in range(count):
        if draw.random() < 0.8:
            model, also_live = draw.choice(models), draw.random() < 0.5
            factor = 1 + draw.choice([0.0] * 8 + [-1e-4, 1e-4])
            for name, column in columns.items():
                if name not in _OF_THE_ROW and (also_live or not name.startswith("live")):
                    column[token] = model[name] * factor


def _log(number: float) -> float:
    """The logarithm, or a neighbour of it whose exponential is ``number`` to the bit, by Python and by torch."""
    middle = math.log(number)
    for log in (middle, math.nextafter(middle, 1e9), math.nextafter(middle, -1e9)):
        if math.exp(log) == number and bool((torch.full((9,), log, dtype=torch.float64).exp() == number).all()):
            return log
    return middle


def with_small(step: Step) -> Step:
    """The step with signals and log-ratios of some tokens so close to 0 that float32 rounding matters."""
    selected, small = torch.arange(len(step)) % 5 == 1, 2.0**-20
    small_values = {name: -small for name in ("logprobs", "max_logprobs") if name in step.evidence}
    small_values |= {
        "old_logprobs": -2 * small,
        **{name: small for name in step.evidence.keys() - LOGS - _OF_THE_ROW - set(MARKS)},
    }
    return step.given(
        **{name: torch.where(selected, value, step.evidence[name]) for name, value in small_values.items()}
    )
