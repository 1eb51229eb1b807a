"""Optimizer steps with a planted gap between sampler and trainer."""

from typing import Any

import torch

from rlstab.record import Header, HostLoss
from rlstab.record.step import Step, rank_of


def step(number: int = 1, *, first: bool = True, seed: int = 0, count: int = 16, **tensors: Any) -> Step:
    """An optimizer step of ``count`` responses of 4 to 40 tokens; the policy is the sampler unless told otherwise."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 41, (count,), generator=draw)
    total = int(lengths.sum())
    logprobs = -3 * torch.rand(total, generator=draw)
    rewards = torch.randn(count, generator=draw)
    known = {
        **{"lengths": lengths, "ids": torch.arange(total), "mask": torch.ones(total, dtype=torch.int64)},
        **{"sequence_ids": torch.arange(count), "group_ids": torch.arange(count) // 4},
        **{"advantages": rewards.repeat_interleave(lengths), "logprobs": logprobs, "rollout_logprobs": logprobs},
    }
    made = {name: value(known, draw) if callable(value) else value for name, value in tensors.items()}
    loss = HostLoss(name="trl/dapo", settings={"low": 0.2, "high": 0.28})
    return rank_of(Header(host="a trainer", step=number, first=first, loss=loss), {**known, **made})


def noise(spread: float) -> Any:
    """A sampler whose log-probs are off by normal noise."""

    def sampled(known: Any, draw: Any) -> Any:
        off = spread * torch.randn(len(known["ids"]), generator=draw)
        return (known["logprobs"] + off).clamp(max=0)

    return sampled


def behind(number: int, engine: float, update: float, **header: Any) -> Step:
    """The step of this number, whose tokens were sampled 0, 1 or 2 updates before, each of which moves the policy.

    The policy of the ratio is that of the first step, as where a trainer keeps its log-probs over a rollout.
    """

    def versions(known: Any, draw: Any) -> Any:
        return number - 1 - torch.arange(len(known["ids"])) % 3

    def sampled(known: Any, draw: Any) -> Any:
        lag = number - 1 - versions(known, draw)
        noise = torch.randn(2, len(lag), generator=draw)
        return low(known, draw) + engine * noise[0] + update * lag.sqrt() * noise[1]

    def low(known: Any, draw: Any) -> Any:
        return known["logprobs"] - 2

    old = {"logprobs": low, "old_logprobs": lambda known, draw: low(known, draw) + 0.02}
    made = step(number, first=False, seed=number, count=96, **old, versions=versions, rollout_logprobs=sampled)
    return Step(made.header.model_copy(update=header), made.tensors, made.ranks)
