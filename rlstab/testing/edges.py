"""Values exactly on a threshold of a method, in which similar methods differ; random numbers hit none of them."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch

from rlstab import TokenObjective
from rlstab.core.batch import BASICS, LOGPROBS, MARKS
from rlstab.core.method import Method
from rlstab.core.method_settings import settings_of
from rlstab.testing.fresh_process import methods_of
from rlstab.testing.steps import KINDS, Step, domain_of, make_step

#: Values of a token that lie exactly on a threshold, by the names of :attr:`Step.columns`.
Edge: TypeAlias = Mapping[str, float]

#: Thresholds that are common in code, for methods without a setting or literal.
ROUND = (0.0, 0.5, 1.0, 2.0, 3.0)
#: Log-probs whose differences methods compare; that of the first two is the ratio's.
_COMPARED = ("live_logprobs", *(name for name in LOGPROBS if name != "max_logprobs"))


def constants_of(method: Method[Any]) -> list[Any]:
    """Names, texts and numbers in the code of a method or stage and of the functions that it calls."""
    classes = [cls for cls in type(method).__mro__ if not cls.__module__.startswith(("rlstab.core.", "abc", "typing"))]
    members = [getattr(member, "__func__", member) for cls in classes for member in vars(cls).values()]
    functions = [member.fget if isinstance(member, property) else member for member in members]
    pending = [
        (function.__code__, function.__globals__) for function in functions if isinstance(function, FunctionType)
    ]
    visited: set[CodeType] = set()
    constants: list[Any] = []
    for code, names in pending:  # which grows
        if code not in visited and not names["__name__"].startswith("rlstab.core."):
            visited.add(code)
            named = [names.get(name) for name in code.co_names]
            constants += [*code.co_names, *code.co_consts, *named]
            pending += [(inner, names) for inner in code.co_consts if isinstance(inner, CodeType)]
            pending += [(callee.__code__, callee.__globals__) for callee in named if isinstance(callee, FunctionType)]
    return _flat(constants)


def _flat(values: Sequence[Any]) -> list[Any]:
    return [item for value in values for item in (value if isinstance(value, tuple) else (value,))]


def words_of(method: Method[Any]) -> set[str]:
    """Names and texts in the code of a method or stage and of the functions that it calls, keywords included."""
    return {constant for constant in constants_of(method) if isinstance(constant, str)}


def numbers_of(method: TokenObjective) -> list[float]:
    """Numbers that a method may compare values with: its settings and the literals of its code, at most 24."""
    parts: list[TokenObjective] = methods_of(method)
    values = _flat([getattr(part, setting.name) for part in parts for setting in settings_of(type(part))])
    values += [constant for part in parts for constant in constants_of(part)]
    numbers = [float(value) for value in values if type(value) in (int, float)]
    return list(dict.fromkeys(number for number in numbers if number == 0 or 1e-6 <= abs(number) <= 1e3))[:24]


def read_by(method: Method[Any]) -> set[str]:
    """Names of the evidence that a method or stage may read, and of live outputs as ``live_<name>``."""
    if not isinstance(method, TokenObjective):
        return set(method.needs)
    live = {f"live_{name}" for name in ("logprobs", *method.live_needs)}
    return {"advantages", *BASICS, *method.needs, *live}


def edges_of(method: TokenObjective) -> Iterator[Edge]:
    """Values that put a quantity that a method may compare on each number that it may compare it with."""
    read = read_by(method) - {*MARKS, "turn_reward"}
    pairs = list(itertools.combinations([name for name in _COMPARED if name in read], 2))
    for number in dict.fromkeys([*numbers_of(method), *ROUND]):
        logs = [_log(ratio) for ratio in (number, 1 + number, 1 - number) if 1e-3 <= ratio <= 1e3]
        for gap in sorted({number, -number, *logs}):
            yield from (apart(*pair, gap) for pair in pairs if abs(gap) < 20)
        for name, value in itertools.product(sorted(read), sorted({number, -number, *logs[:1]})):
            low, high = domain_of(name)
            if max(low, -80) <= value <= high:
                yield {name: value}


def apart(name: str, less: str, gap: float) -> Edge:
    """Two log-probs with a difference to the bit: where one of the two is 0, it is not rounded."""
    return {name: min(gap, 0.0), less: min(-gap, 0.0)} if gap else {name: -0.7, less: -0.7}


#: Number of edges that fit into a rich step, and its responses.
_ROOM, _RICH = 30, [7, 1, 10, 4, 10, 4, 7, 7]


def count(edges: Sequence[Edge]) -> int:
    """The number of rich steps that the edges need."""
    return max(1, -(-len(edges) // _ROOM))


def draw_step(
    number: int, extra: Sequence[str], edges: Sequence[Edge], *, size: int | None = None, extreme: bool = False
) -> Step:
    """One of the optimizer steps of the laws, the same for the same number.

    Args:
        number: the number of the step; the first ``count(edges)`` rich ones together have all edges for which there
            are tokens with an advantage.
        extra: names of user-defined signals to draw, see :func:`make_step`.
        edges: values to put tokens on, see :func:`edges_of`.
        size: up to one more than this many rows, of up to one more than this many tokens, at most 8 each; None makes a
            rich step, eight responses with some of everything.
        extreme: whether values go as far as numbers can, see :func:`make_step`.
    """
    draw, kind, group, lengths = random.Random(number), "mixed", 2, _RICH
    if size is not None:
        longest = min(8, 1 + size)
        lengths = [draw.randint(0, longest) for _ in range(draw.randint(1, longest))]
        lengths[0] += sum(lengths) == 2  # two tokens have one covariance, of which rounding would choose
        kind, group = list(KINDS)[min(3, number % 7)], draw.choice([1, 2, 4])  # four in seven are mixed
    return sharpened(make_step(kind, lengths, group, number, extra, extreme=extreme), number, edges)


def sharpened(step: Step, number: int, edges: Sequence[Edge]) -> Step:
    """The step with tokens on some of the edges or just next to one; ``number`` chooses which.

    Each token that has an advantage takes an edge of its own as long as there are any, then a value next to one. All
    tokens of some responses lie on one edge.
    """
    # a method may declare what does not exist
    edges = [edge for edge in edges if edge.keys() <= step.columns.keys()]
    if not edges:
        return step
    draw, columns = random.Random(number), {name: values.tolist() for name, values in step.columns.items()}
    remaining = random.Random(1).sample(edges, len(edges))[number % count(edges) :: count(edges)]
    of_rows = [draw.choice(edges) if draw.random() < 0.2 else {} for _ in step.units]
    for token, row in enumerate(step.sequence.tolist()):
        changes = dict(of_rows[row])
        if columns["advantages"][token]:
            nearby = 1 + draw.choice([-1e-4, -1e-9, 1e-9, 1e-4])
            changes |= remaining.pop() if remaining else {k: value * nearby for k, value in draw.choice(edges).items()}
        for name, value in changes.items():
            columns[name][token] = value
    columns["max_logprobs"] = list(map(max, columns["max_logprobs"], columns["logprobs"]))
    return step.given(
        **{name: torch.tensor(values, dtype=torch.float64).clamp(*domain_of(name)) for name, values in columns.items()}
    )


def _log(number: float) -> float:
    """The logarithm, or a neighbour of it whose exponential is ``number`` to the bit, by Python and by torch."""
    middle = math.log(number)
    for log in (middle, math.nextafter(middle, 1e9), math.nextafter(middle, -1e9)):
        if math.exp(log) == number and bool((torch.full((9,), log, dtype=torch.float64).exp() == number).all()):
            return log
    return middle
