"""Prompts one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlstab.core.method import State
from rlstab.core.random import uniform
from rlstab.stages.stage import Offer, PromptSelector

#: Added to the seed: the order of prompts is a stream of random numbers of its own.
STREAM = 1_000_000_007


@dataclass(frozen=True)
class InOrder(PromptSelector):
    """Takes prompts one after another, and goes through a task that has an end again, each time in a new order."""

    name: ClassVar[str] = "in_order"

    shuffle: bool = True

    def select(self, offer: Offer, state: State) -> Tensor:
        places = offer.drawn + torch.arange(offer.count)
        if offer.size is None:
            return places
        epoch, within = places // offer.size, places % offer.size
        if not self.shuffle:
            return within
        chosen = within.clone()
        for one in epoch.unique():
            order = uniform(offer.seed + STREAM, one, torch.arange(offer.size)).argsort()
            chosen[epoch == one] = order[within[epoch == one]]
        return chosen
