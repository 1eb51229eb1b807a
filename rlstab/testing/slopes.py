"""Gradients against finite differences from both sides, which tell a kink from a jump and both from a wrong slope."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlstab.testing import tolerances
from rlstab.testing.agreement import BrokenLaw

#: Values that are moved; the loss is computed twice for each.
MOVED = 40


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
