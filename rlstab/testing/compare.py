"""When two outcomes are the same and a gradient is a slope, and what to say when they are not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from rlstab.core.stats import Grouped, Mean, Pool, Summary
from rlstab.testing import tolerances
from rlstab.testing.run import StepOutcome

#: Values that are moved to compare a gradient with slopes; the loss is computed twice for each.
MOVED = 40


class BrokenLaw(AssertionError):
    """A method does not obey a law; the text says what was seen."""


def close(what: str, one: StepOutcome, other: StepOutcome, tolerance: float) -> None:
    """Loss, gradients, report, state and learning-rate scale of two outcomes agree."""
    scale = max(one.scale, other.scale)
    near(f"{what}: the loss", one.loss, other.loss, tolerance * scale)
    near(f"{what}: lr_scale", one.lr_scale, other.lr_scale, tolerance)
    for name, gradient in one.gradients.items():
        worst = float((gradient - other.gradients[name]).abs().max()) if gradient.numel() else 0.0
        if not worst <= tolerance * scale:
            raise BrokenLaw(f"{what}: the gradient of '{name}' moves by {worst:.3g}.")
    mine, theirs = ({name: mean.value for name, mean in side.report.items()} for side in (one, other))
    for name in sorted(mine.keys() | theirs.keys()):
        here, there = mine.get(name, math.nan), theirs.get(name, math.nan)
        if math.isnan(here) != math.isnan(there):
            raise BrokenLaw(f"{what}: the metric '{name}' is {here!r} and {there!r}; nan is one that counted nothing.")
        if not math.isnan(here):
            near(f"{what}: the metric '{name}'", here, there, tolerance * (1 + abs(here)))
    same_state(what, one.state, other.state, tolerance)


def near(what: str, one: float, other: float, within: float) -> None:
    """Two numbers differ by no more than ``within``; NaN is near nothing."""
    if not abs(one - other) <= within:
        raise BrokenLaw(f"{what} is {one!r} and {other!r}.")


def same_state(what: str, one: Any, other: Any, tolerance: float) -> None:
    """Two states agree, number by number."""
    if isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        for key in one:
            same_state(f"{what}: state['{key}']", one[key], other[key], tolerance)
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        if not torch.allclose(one.double(), other.double(), atol=tolerance, rtol=tolerance, equal_nan=True):
            raise BrokenLaw(f"{what} is {one} and {other}.")
    elif isinstance(one, float) and isinstance(other, float):
        near(what, one, other, tolerance * (1 + abs(one)))
    elif one != other:
        raise BrokenLaw(f"{what} is {one!r} and {other!r}.")


def same_summary(what: str, one: Summary, other: Summary) -> None:
    """Two summaries agree: means in total and count, pools in the threshold that they settle to."""
    if isinstance(one, Pool) and isinstance(other, Pool):
        a, b = one.threshold(), other.threshold()
        if (a.value, a.size) != (b.value, b.size):
            raise BrokenLaw(f"the statistic {what} is {a} and {b}.")
        return
    if isinstance(one, Grouped) and isinstance(other, Grouped):
        if not torch.equal(one.keys, other.keys) or not torch.equal(one.counts, other.counts):
            raise BrokenLaw(f"the statistic {what} has the keys {one.keys} and {other.keys}, or other counts.")
        for mine, theirs in zip(one.totals.tolist(), other.totals.tolist(), strict=True):
            near(f"a total of {what}", mine, theirs, tolerances.REORDERED * (1 + abs(mine)))
        return
    assert isinstance(one, Mean)
    assert isinstance(other, Mean)
    near(
        f"the total of {what}", float(one.total), float(other.total), tolerances.REORDERED * (1 + abs(float(one.total)))
    )
    near(f"the count of {what}", float(one.count), float(other.count), 0.0)


def check_slopes(loss: Callable[[Mapping[str, Tensor]], Tensor], live: Mapping[str, Tensor], seed: int) -> None:
    """Compare the gradient of a loss with the slopes of the loss itself, at some values drawn by ``seed``.

    Where the two sides differ there is a kink, and a gradient between the two is right.

    Raises:
        BrokenLaw: it is no slope of the loss, or the loss jumps.
    """
    leaves = {name: values.clone().requires_grad_() for name, values in live.items()}
    value = loss(leaves)
    value.backward()
    with torch.no_grad():
        middle = float(value)
        within = tolerances.GRADCHECK_ABSOLUTE * (1 + abs(middle))
        draw = random.Random(seed)
        moving = [(name, place) for name, one in leaves.items() if one.grad is not None for place in range(one.numel())]
        still = [(name, place) for name, one in leaves.items() if one.grad is None for place in range(one.numel())]
        places = draw.sample(moving, min(MOVED, len(moving))) + draw.sample(still, min(2, len(still)))
        for name, place in places:
            gradient = leaves[name].grad
            slope = 0.0 if gradient is None else float(gradient[place])

            def side(step: float, name: str = name, place: int = place, slope: float = slope) -> tuple[float, float]:
                """The slope towards one side, and how far it is off where that is no matter of rounding."""
                moved = live[name].clone()
                moved[place] += step
                found = (float(loss({**live, name: moved})) - middle) / step
                return found, max(0.0, abs(found - slope) - within - tolerances.GRADCHECK_RELATIVE * abs(found))

            step = tolerances.GRADCHECK_STEP
            (left, off_left), (right, off_right) = side(-step), side(step)
            for found, off, towards in ((left, off_left, -step), (right, off_right, step)):
                if off and abs(side(towards / 4)[0] - slope) > 2 * abs(found - slope):
                    raise BrokenLaw(
                        f"the loss jumps where the live '{name}' of token {place} moves. A decision that reads the "
                        f"live policy does that; make it from the evidence."
                    )
            if off_left and off_right and not min(left, right) < slope < max(left, right):
                raise BrokenLaw(
                    f"finite differences disagree: the gradient of the live '{name}' of token {place} is {slope:.6g}, "
                    f"and the slope of the loss is {left:.6g} below and {right:.6g} above."
                )


def leaves_of(data: Any, place: str = "state") -> Iterator[tuple[str, Any]]:
    """What is at the ends of mappings and dataclasses, each with its place."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves_of(value, f"{place}['{key}']")
    elif is_dataclass(data) and not isinstance(data, type):
        for field in fields(data):
            yield from leaves_of(getattr(data, field.name), f"{type(data).__name__}.{field.name}")
    else:
        yield place, data


def check_state(state: Mapping[str, Any], initial: Mapping[str, Any]) -> None:
    """A state holds numbers, bools and tensors under names, and each of them stays of the kind that it had at first.

    Raises:
        BrokenLaw: names the entry.
    """
    _check_keys(state, "state")
    first = dict(leaves_of(initial))
    for place, value in leaves_of(state):
        if not isinstance(value, bool | int | float | str | Tensor) and value is not None:
            raise BrokenLaw(f"{place} is a {type(value).__name__}; a state holds numbers, bools and tensors.")
        before = first.get(place, value)
        if isinstance(value, Tensor) != isinstance(before, Tensor):
            raise BrokenLaw(f"{place} was {before!r} and is {value!r}; a tensor stays one.")
        kinds = [(one.dtype, one.ndim) for one in (before, value) if isinstance(one, Tensor)]
        if len(set(kinds)) > 1:
            raise BrokenLaw(f"{place} was {kinds[0]} and is {kinds[1]} in dtype and dimensions.")
        if isinstance(value, float | Tensor) and not bool(torch.as_tensor(value).isfinite().all()):
            raise BrokenLaw(f"{place} is {value}, which is not finite.")


#: Keys that stand for a tensor where a state is written as JSON.
_MARKS = frozenset({"tensor", "__tensor__"})


def _check_keys(state: Mapping[str, Any], place: str) -> None:
    for key, value in state.items():
        if not isinstance(key, str):
            raise BrokenLaw(f"{place} has the key {key!r}; JSON holds texts. Write {str(key)!r}.")
        if key in _MARKS:
            raise BrokenLaw(
                f"{place}['{key}'] has a name by which records of a state in JSON mark a tensor, so it may come back "
                f"as one. Give it another name."
            )
        if isinstance(value, Mapping):
            _check_keys(value, f"{place}['{key}']")


def through_json(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state after a checkpoint: JSON, and tensors beside it."""
    tensors: list[Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, Tensor):
            tensors.append(value.detach().clone())
            return [len(tensors) - 1]  # a state holds no lists
        return value

    def back(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: back(inner) for key, inner in value.items()}
        return tensors[value[0]] if isinstance(value, list) else value

    restored: dict[str, Any] = back(json.loads(json.dumps(plain(state))))
    return restored


def check_repr(text: str, original: object, names: Mapping[str, type], more: Mapping[str, Any]) -> None:
    """``repr`` gives an equal object.

    Args:
        text: the repr.
        original: that it is of.
        names: classes in it; one made inside a function calls itself by a path that Python cannot read.
        more: other names in it.

    Raises:
        BrokenLaw: it does not.
    """
    for cls in names.values():
        text = text.replace(f"{cls.__qualname__}(", f"{cls.__name__}(")
    if eval(text, {**names, **more}) != original:
        raise BrokenLaw(f"its repr does not give it back: {original!r}.")
