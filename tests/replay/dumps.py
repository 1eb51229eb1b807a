"""Dumps of made-up optimizer steps: two ranks of four micro-batches, off-policy, masked tokens, a reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlstab.replay.host_loss import FORMULAS, Formula, coefficients_of, values_of
from rlstab.replay.rank import Rank
from rlstab.replay.steps import Step, step_of
from rlstab.trace.dump import Header, HostLoss, write_dump

SETTINGS = {
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "delta": 1.35,
    "beta": 0.05,
    "use_bias_correction_kl": True,
    "max_completion_length": 12,
}


def rank(number: int, step: int, *, loss: str = "trl/dapo", first: bool = False) -> Rank:
    """Eight responses of 3 to 12 tokens, some of them outside the mask."""
    draw = torch.Generator().manual_seed(100 * step + number)
    lengths = torch.randint(3, 13, (8,), generator=draw)
    count = int(lengths.sum())

    def around(values: Tensor, spread: float) -> Tensor:
        return (values + spread * torch.randn(count, generator=draw)).clamp(max=-1e-4)

    sampled = -4 * torch.rand(count, generator=draw)
    mask = (torch.rand(count, generator=draw) > 0.15).to(torch.uint8)
    mask[lengths.cumsum(0) - 1] = 1
    old = around(sampled, 0.05)
    tensors = {
        "lengths": lengths,
        "parts": torch.arange(8) // 2,
        "sequence_ids": 8 * number + torch.arange(8),
        "group_ids": torch.arange(8) // 4 + 2 * number,
        "ids": torch.randint(1, 28, (count,), generator=draw),
        "mask": mask,
        "advantages": torch.randn(8, generator=draw).repeat_interleave(lengths),
        "old_logprobs": old,
        "logprobs": old.clone() if first else around(old, 0.25),
        "rollout_logprobs": sampled,
        "ref_logprobs": around(old, 0.3),
        "entropies": 2 * torch.rand(count, generator=draw),
        "prompt_lengths": torch.full((8,), 2),
        "prompt_ids": torch.arange(16) % 9 + 1,
    }
    told = HostLoss(name=loss, settings=SETTINGS)
    return Rank(Header(host="made up", step=step, rank=number, ranks=2, parts=4, first=first, loss=told), tensors)


Change = Callable[[Formula, Step], Formula]


def step(
    number: int, *, loss: str = "trl/dapo", change: Change = lambda formula, _: formula, first: bool = False
) -> Step:
    """An optimizer step that says it has one loss, and has the one that `change` makes of it."""
    made = step_of(number, [rank(0, number, loss=loss, first=first), rank(1, number, loss=loss, first=first)])
    assert made.loss is not None
    formula = change(FORMULAS[loss](made.loss.settings), made)
    values = values_of(made, formula).tolist()
    told = made.loss.model_copy(update={"values": values})
    return replace(made, tokens={**made.tokens, "coefficients": coefficients_of(made, formula).float()}, loss=told)


def without_coefficients(given: Step) -> Step:
    return replace(given, tokens={name: values for name, values in given.tokens.items() if name != "coefficients"})


def write(folder: Path, steps: int = 2) -> Path:
    """A dump on disk."""
    for number in range(1, steps + 1):
        whole = step(number)
        assert whole.loss is not None
        tokens = 0
        for place in range(2):
            own = rank(place, number)
            count = own.tensors["ids"].numel()
            slopes = whole.tokens["coefficients"][tokens : tokens + count]
            tokens += count
            loss = whole.loss.model_copy(update={"values": whole.loss.values[4 * place : 4 * place + 4]})
            header = own.header.model_copy(update={"loss": loss})
            write_dump(folder, header, {**own.tensors, "coefficients": slopes})
    return folder
