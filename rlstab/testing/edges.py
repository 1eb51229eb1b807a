"""Edge cases in which similar methods differ: ties, values exactly on a threshold, ratios far from 1 and of exactly 1.

Continuous random numbers hit none of these. A step of :mod:`rlstab.testing.steps` is sharpened here before a law sees
it.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch

from rlstab import TokenObjective
from rlstab.core.batch import BASICS, LOGPROBS, MARKS
from rlstab.core.method import Method
from rlstab.core.method_settings import settings_of
from rlstab.testing.fresh_process import methods_of
from rlstab.testing.steps import Step, domain_of, make_step

#: Values of a token that lie exactly on a threshold, by the names of :attr:`Step.columns`.
Edge: TypeAlias = Mapping[str, float]

#: Thresholds that are common in code, for methods without a setting or literal.
ROUND = (0.0, 0.5, 1.0, 2.0, 3.0)
#: Quantities that do not follow from one token's numbers: a copy of a token keeps them.
_OF_THE_ROW = frozenset({"advantages", "turn_reward", *MARKS})
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


def edges_of(method: TokenObjective) -> Iterator[Edge]:
    """Values that put a quantity that a method may compare on each number that it may compare it with."""
    read = {"advantages", "live_logprobs", *BASICS, *method.needs, *(f"live_{name}" for name in method.live_needs)}
    read -= {*MARKS, "turn_reward"}
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


#: Number of edges that fit into a rich step.
_ROOM = 30


def count(edges: Sequence[Edge]) -> int:
    """The number of rich steps that the edges need."""
    return max(1, -(-len(edges) // _ROOM))


def rich_step(number: int, extra: Sequence[str], edges: Sequence[Edge], *, extreme: bool = False) -> Step:
    """One of the optimizer steps with which laws begin: eight responses with some of everything.

    Together, the first ``count(edges)`` of them have all edges.
    """
    spread = random.Random(1).sample(edges, len(edges))
    step = make_step("mixed", (7, 1, 10, 4, 10, 4, 7, 7), 2, number, extra, extreme=extreme)
    return sharpened(step, number, spread[number % count(edges) :: count(edges)])


def sharpened(step: Step, seed: int, edges: Sequence[Edge] = ()) -> Step:
    """The step with some tokens alike, some far off policy, some exactly on it, and some exactly on thresholds.

    Args:
        step: with continuous random numbers.
        seed: the seed of all choices.
        edges: to put tokens on, each on one as far as there are tokens with an advantage, and the others just next to
            one. Without any, some tokens have values so close to 0 that float32 rounding matters, and ratios stay
            moderate: a threshold and its value may fall on different sides in another precision.
    """
    if not len(step):
        return step
    draw = random.Random(seed)
    columns = {name: values.tolist() for name, values in step.columns.items()}
    edges = [edge for edge in edges if edge.keys() <= columns.keys()]  # a method may declare what does not exist
    compared = [name for name in columns if name not in _OF_THE_ROW]
    models = [{name: columns[name][token] for name in compared} for token in draw.choices(range(len(step)), k=3)]
    far = 6.9 if edges else 0.9
    columns["advantages"] = [math.copysign(math.ceil(abs(2 * value)) / 2, value) for value in columns["advantages"]]
    remaining = draw.sample(edges, len(edges))
    of_rows = [draw.choice(edges) if edges and draw.random() < 0.2 else {} for _ in step.units]
    for token, row in enumerate(step.sequence.tolist()):
        model, also_live, factor = draw.choice(models), draw.random() < 0.5, 1 + draw.choice([0.0] * 8 + [-1e-4, 1e-4])
        changes: dict[str, float] = {}
        if draw.random() < 0.8:
            copied = (name for name in compared if also_live or not name.startswith("live_"))
            changes |= {name: model[name] * factor for name in copied}
        if draw.random() < 0.1:  # the policies agree to the bit on a token
            changes |= dict.fromkeys(_COMPARED[:3], columns["logprobs"][token])
        elif draw.random() < 0.2:  # or two of them differ by a factor of up to a thousand
            changes |= apart(*draw.choice(list(itertools.combinations(_COMPARED, 2))), draw.uniform(-far, far))
        changes |= of_rows[row]
        if edges and columns["advantages"][token]:
            nearby = 1 + draw.choice([-1e-4, -1e-9, 1e-9, 1e-4])
            edge = draw.choice(edges)
            changes |= remaining.pop() if remaining else {name: value * nearby for name, value in edge.items()}
        elif not edges and draw.random() < 0.2:
            signs = {name: 1 if domain_of(name)[1] > 0 else -draw.choice((1, 2)) for name in compared}
            changes |= {name: sign * 2.0**-20 for name, sign in signs.items()}
        for name, value in changes.items():
            columns[name][token] = value
    columns["max_logprobs"] = list(map(max, columns["max_logprobs"], columns["logprobs"]))
    tensors = {
        name: torch.tensor(values, dtype=torch.float64).clamp(*domain_of(name)) for name, values in columns.items()
    }
    # the number of a group is not an index into a list
    labels = torch.tensor(draw.sample(range(5, 500), int(step.group_ids.max()) + 1))
    live = {name: tensors.pop(f"live_{name}") for name in step.live}
    return replace(step, evidence=tensors, live=live, group_ids=labels[step.group_ids])


def _log(number: float) -> float:
    """The logarithm, or a neighbour of it whose exponential is ``number`` to the bit, by Python and by torch."""
    middle = math.log(number)
    for log in (middle, math.nextafter(middle, 1e9), math.nextafter(middle, -1e9)):
        if math.exp(log) == number and bool((torch.full((9,), log, dtype=torch.float64).exp() == number).all()):
            return log
    return middle
