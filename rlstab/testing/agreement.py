"""When two outcomes are the same, and what to say when they are not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlstab.core.stats import Grouped, Mean, Pool, Summary
from rlstab.testing import tolerances
from rlstab.testing.outcome import Outcome


class BrokenLaw(AssertionError):
    """A method does not obey a law; the text says what was seen."""


def close(what: str, one: Outcome, other: Outcome, tolerance: float) -> None:
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
