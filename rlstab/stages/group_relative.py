"""Group-relative advantage estimators: what a response earned beyond the other answers to its prompt.

All take ``(S,)`` rewards and ``(S,)`` integer group ids, complete groups in any order, and give ``(S,)`` advantages in
float64. A group whose rewards are equal but for rounding, or that has one member, gets exactly 0: there is nothing to
compare with. (verl leaves a lone answer its reward; in verl and TRL the rounding of a mean of equal rewards is divided
by epsilon.)
"""

import math

import torch
from torch import Tensor

from rlstab import Mean, Pool, Settled, Stat
from rlstab.errors import ShapeError

#: Rewards that differ by at most this share of their size are equal: four roundings of float32.
RELATIVE = 5e-7
#: Rewards near 0 that differ by at most this are equal too: 0.1 + 0.2 - 0.3 is 6e-17.
ABSOLUTE = 5e-15


def alike(low: Tensor, high: Tensor) -> Tensor:
    """Bools: whether rewards from ``low`` to ``high`` are equal but for rounding, such as 0.3 and 0.1 + 0.2.

    The one definition of equal rewards, for groups and for rollouts without a signal.
    """
    return torch.isclose(low, high, rtol=RELATIVE, atol=ABSOLUTE)


def extremes(values: Tensor) -> Stat:
    """What :func:`all_alike` reads: the smallest and the largest value."""
    return {"low": Pool.quantile(values, 0.0), "high": Pool.quantile(values, 1.0)}


def all_alike(stat: Settled) -> bool:
    """The same as :func:`alike` for a whole rollout, by its :func:`extremes`; True without values.

    By range, not by variance: the mean of equal numbers can miss them by a rounding.
    """
    low, high = stat.threshold("low").value, stat.threshold("high").value
    return low is None or high is None or math.isclose(low, high, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def sample_variance(square: Mean) -> float:
    """The sum of squared deviations, divided by their number less 1, or by 1 where that is less."""
    return float(square.total) / max(float(square.count) - 1, 1.0)


def equal_within(values: Tensor, group: Tensor, where: Tensor | None = None) -> Tensor:
    """``(S,)`` bool, True where all ``(S,)`` values of the group are :func:`alike`.

    By range, not by deviation: the mean of equal numbers can miss them by a rounding, and AdamW would amplify that.

    Args:
        values: ``(S,)`` float64.
        group: ``(S,)`` int64 numbers of groups, from 0.
        where: ``(S,)`` bool, the values that count; None is all of them.
    """
    infinite = values.new_full((int(group.max()) + 1 if group.numel() else 0,), torch.inf)
    low = infinite.scatter_reduce(0, group, values if where is None else values.where(where, torch.inf), "amin")
    high = (-infinite).scatter_reduce(0, group, values if where is None else values.where(where, -torch.inf), "amax")
    return alike(low, high)[group]


def grpo(rewards: Tensor, group_ids: Tensor, *, std: bool = True, epsilon: float = 1e-4, ddof: int = 1) -> Tensor:
    """``(R - mean) / (std + epsilon)`` within the group (arXiv 2402.03300 section 4.1.2).

    Args:
        rewards: ``(S,)``.
        group_ids: ``(S,)``.
        std: divide by the standard deviation; False is :func:`dr_grpo`.
        epsilon: added to it; 1e-4 in TRL, 1e-6 in verl, in no paper.
        ddof: 1 divides the squared deviations by n - 1 (verl and TRL), 0 by n.
    """
    deviation, group, size, equal = _deviation(rewards, group_ids)
    if std:
        squares = torch.zeros_like(size).index_add(0, group, deviation.square())
        spread = (squares / (size - ddof).clamp(min=1)).sqrt()
        deviation = deviation / (spread[group] + epsilon)
    return torch.where(equal, torch.zeros_like(deviation), deviation)


def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``R - mean``: no division, so easy and hard prompts are not amplified (arXiv 2503.20783 section 3.2)."""
    return grpo(rewards, group_ids, std=False)


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``R`` minus the mean of the others, which is ``n / (n - 1) (R - mean)`` (arXiv 2402.14740 eq. 8)."""
    deviation, group, size, equal = _deviation(rewards, group_ids)
    deviation = deviation * (size / (size - 1).clamp(min=1))[group]
    return torch.where(equal, torch.zeros_like(deviation), deviation)


def _deviation(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ShapeError(
            f"rewards are {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)}; expected (S,) for both."
        )
    rewards = rewards.double()
    group = torch.unique(group_ids, return_inverse=True)[1]
    groups = int(group.max()) + 1 if group.numel() else 0
    zeros = torch.zeros(groups, dtype=torch.float64, device=rewards.device)
    size = zeros.index_add(0, group, torch.ones_like(rewards))
    mean = zeros.index_add(0, group, rewards) / size
    return rewards - mean[group], group, size, equal_within(rewards, group)
