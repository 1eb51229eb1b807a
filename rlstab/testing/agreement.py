"""Whether two outcomes are the same and a gradient is a slope, and the errors if not."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlstab import State
from rlstab.core.saved_state import dump_state, load_state
from rlstab.testing import tolerances

#: Number of values that are moved to compare a gradient with slopes; the loss is computed twice for each.
MOVED = 24


class BrokenLaw(AssertionError):
    """A method does not obey a law; the text says how."""


def same_state(what: str, given: Any, other: Any, tolerance: float) -> None:
    """Require that two states, or other nested values, agree number by number."""
    if isinstance(given, Mapping) and isinstance(other, Mapping) and given.keys() == other.keys():
        for key in given:
            same_state(f"{what}['{key}']", given[key], other[key], tolerance)
    elif isinstance(given, float | Tensor) and type(given) is type(other):
        one_side, other_side = (torch.as_tensor(value, dtype=torch.float64) for value in (given, other))
        if one_side.shape != other_side.shape or not torch.allclose(
            one_side, other_side, tolerance, tolerance, equal_nan=True
        ):
            raise BrokenLaw(f"{what} is {given!r} and {other!r}.")
    elif given != other:
        raise BrokenLaw(f"{what} is {given!r} and {other!r}.")


def check_slopes(loss: Callable[[Mapping[str, Tensor]], Tensor], live: Mapping[str, Tensor], seed: int) -> None:
    """Compare the gradient of a loss with the slopes of the loss itself, at some values drawn by ``seed``.

    If the slopes of the two sides differ, there is a kink, and a gradient between them is right.

    Raises:
        BrokenLaw: it is not a slope of the loss, or the loss jumps.
    """
    leaves = {name: values.clone().requires_grad_() for name, values in live.items()}
    value = loss(leaves)
    value.backward()
    with torch.no_grad():
        middle = float(value)
        within = tolerances.GRADCHECK_ABSOLUTE * (1 + abs(middle))
        draw = random.Random(seed)
        moving = [(name, token) for name, leaf in leaves.items() if leaf.grad is not None for token in range(len(leaf))]
        unmoved = [(name, token) for name, leaf in leaves.items() if leaf.grad is None for token in range(len(leaf))]
        tokens = draw.sample(moving, min(MOVED, len(moving))) + draw.sample(unmoved, min(2, len(unmoved)))
        for name, token in tokens:
            gradient = leaves[name].grad
            slope = 0.0 if gradient is None else float(gradient[token])

            def side(step: float, name: str = name, token: int = token, slope: float = slope) -> tuple[float, float]:
                """The slope towards one side, and its error beyond rounding."""
                moved = live[name].clone()
                moved[token] += step
                quotient = (float(loss({**live, name: moved})) - middle) / step
                error = abs(quotient - slope) - within - tolerances.GRADCHECK_RELATIVE * abs(quotient)
                return quotient, max(0.0, error)

            step = tolerances.GRADCHECK_STEP
            (left, off_left), (right, off_right) = side(-step), side(step)
            for quotient, error, towards in ((left, off_left, -step), (right, off_right, step)):
                if error and abs(side(towards / 4)[0] - slope) > 2 * abs(quotient - slope):
                    raise BrokenLaw(
                        f"the loss jumps where the live '{name}' of token {token} moves. Decide by the evidence."
                    )
            if off_left and off_right and not min(left, right) < slope < max(left, right):
                raise BrokenLaw(
                    f"finite differences disagree: the gradient of the live '{name}' of token {token} is {slope:.6g}, "
                    f"and the slope of the loss is {left:.6g} below and {right:.6g} above."
                )


def leaves_of(data: Any, path: str = "state") -> Iterator[tuple[str, Any]]:
    """The leaves of mappings and dataclasses, each with its path."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves_of(value, f"{path}['{key}']")
    elif is_dataclass(data) and not isinstance(data, type):
        for field in fields(data):
            yield from leaves_of(getattr(data, field.name), f"{type(data).__name__}.{field.name}")
    else:
        yield path, data


def check_state(state: Mapping[str, Any], initial: Mapping[str, Any]) -> None:
    """Require that a checkpoint can hold a state, and that each entry keeps its kind.

    Plain dicts with text as keys, and numbers, bools, text and tensors; of subclasses, such as ``numpy.float64``, a
    ``defaultdict`` or a tensor with attributes, a checkpoint restores something else.

    Raises:
        BrokenLaw: names the entry.
    """
    _check_restored(state, load_state(*dump_state(state)), "state")
    first = dict(leaves_of(initial))
    for path, value in leaves_of(state):
        before = first.get(path, value)
        kinds = [(leaf.dtype, leaf.ndim) if isinstance(leaf, Tensor) else "no tensor" for leaf in (before, value)]
        if kinds[0] != kinds[1]:
            raise BrokenLaw(
                "{} was {} and is {}; a tensor stays one, of its dtype and dimensions.".format(path, *kinds)
            )
        if isinstance(value, float | Tensor) and not bool(torch.as_tensor(value).isfinite().all()):
            raise BrokenLaw(f"{path} is {value}, which is not finite.")


def _check_restored(value: Any, restored: Any, path: str) -> None:
    """See :func:`check_state`."""
    odd = isinstance(value, list) or (isinstance(value, Tensor) and (value.requires_grad or vars(value)))
    if odd or type(value) is not type(restored):
        cls = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise BrokenLaw(
            f"{path} is {value!r} of {cls}, which a checkpoint does not give back. A state holds plain dicts with text "
            f"as keys, numbers, bools, text and tensors without gradient or attributes: convert it by str(key), "
            f"float(...), dict(...), torch.as_tensor(...) or .detach()."
        )
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_restored(entry, restored.get(key), f"{path}['{key}']")
    else:
        same_state(f"{path}, as it was saved and as it is read back,", value, restored, 0.0)


def size_of(state: State) -> int:
    """The number of numbers and letters in a state."""
    values = [value for _, value in leaves_of(state)]
    letters = sum(len(value) for value in values if isinstance(value, str))
    return len(values) + letters + sum(value.numel() for value in values if isinstance(value, Tensor))


def check_bounded(sizes: Sequence[int]) -> None:
    """Require that a state does not grow without bound.

    Args:
        sizes: the size of the state after each of many optimizer steps or rollouts, in order.

    Raises:
        BrokenLaw: it grew in each of the last ten.
    """
    late = sizes[-11:]
    if len(late) == 11 and all(before < after for before, after in pairwise(late)):
        raise BrokenLaw(
            f"the state grows: {late[0]} numbers became {late[-1]} in ten more. Keep sums, or a window of fixed length."
        )
