"""Engines in which every process holds all the weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from rlstab.train.engines.engine import Engine, Moments
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy
from rlstab.train.shared_prompts import SharedPrompts


class WholeWeights(Engine):
    """The policy's own model is what learns."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self.policy.model.named_parameters())

    def whole(self) -> AbstractContextManager[Policy]:
        return nullcontext(self.policy)

    def frozen(self, policy: Policy) -> Callable[[], AbstractContextManager[Policy]]:
        policy.model.requires_grad_(False)
        return lambda: nullcontext(policy)

    def shared_prompts(self, sequences: Sequences) -> SharedPrompts | None:
        return self.policy.shared_prompts(sequences)

    def clip(self, largest: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), largest))

    def gathered(self, one: Tensor) -> Tensor:
        return one

    def restore(self, optimizer: torch.optim.Optimizer, moments: Moments) -> None:
        weights = self.weights
        for name, values in moments.items():
            device = weights[name].device
            optimizer.state[weights[name]] = {
                key: value if key == "step" else value.to(device) for key, value in values.items()
            }
