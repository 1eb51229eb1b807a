"""What a run asks of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from rlstab.signals import TokenSignals
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy
from rlstab.train.shared_prompts import SharedPrompts

Part = TypeVar("Part")

#: What an optimizer keeps of each weight, by the weight's name.
Moments: TypeAlias = Mapping[str, Mapping[str, Tensor]]


class Engine(ABC):
    """Holds the policy that learns.

    Attributes:
        policy: its tokenizer and settings serve at any time; its model only inside :meth:`whole`.
    """

    policy: Policy

    @property
    @abstractmethod
    def in_words(self) -> str:
        """What it is, for ``run.json`` and the terminal."""

    @property
    @abstractmethod
    def weights(self) -> dict[str, nn.Parameter]:
        """What an optimizer moves, by the names in a checkpoint: whole, or this process's shards."""

    @abstractmethod
    def whole(self) -> AbstractContextManager[Policy]:
        """The policy with all of its weights as they are now; every process enters. Inside, each forwards as it likes.

        They are only to be read: what samples, evaluates, compares, differentiates without a step, or is saved.
        """

    @abstractmethod
    def frozen(self, policy: Policy) -> Callable[[], AbstractContextManager[Policy]]:
        """The :meth:`whole` of another policy, which is held as this one is and never learns."""

    @abstractmethod
    def rounds(self, parts: Sequence[Part]) -> Iterator[Part | None]:
        """The parts of an optimizer step of this process, one for each forward and backward.

        None where this process has nothing left to do and others have. :meth:`backward` follows each.
        """

    @abstractmethod
    def shared_prompts(self, sequences: Sequences) -> SharedPrompts | None:
        """:meth:`Policy.shared_prompts` for :meth:`signals`, asked before any of :meth:`rounds`."""

    @abstractmethod
    def signals(
        self,
        sequences: Sequences,
        index: Tensor,
        *,
        temperature: float,
        needs: Set[str],
        options: Mapping[str, float],
        rows: Mapping[str, Tensor] | None = None,
        shared: SharedPrompts | None = None,
    ) -> TokenSignals:
        """:meth:`Policy.signals` with a gradient, at most once in each of :meth:`rounds`."""

    @abstractmethod
    def backward(self, loss: Tensor | None) -> None:
        """Add this process's gradient; None where the round has none. After the last they are sums over processes."""

    @abstractmethod
    def clip(self, largest: float) -> float:
        """Scale the gradient down to a norm of at most ``largest``; its norm before, the same in all processes."""

    def moments(self, optimizer: torch.optim.Optimizer) -> Moments:
        """What the optimizer keeps of each weight it has moved, whole or in shards that have the shape of the whole."""
        kept = {name: optimizer.state.get(one) for name, one in self.weights.items()}
        return {name: values for name, values in kept.items() if values}

    @abstractmethod
    def gathered(self, one: Tensor) -> Tensor:
        """All of a tensor of :meth:`moments`, and any other as it is; every process asks for the same one."""

    @abstractmethod
    def restore(self, optimizer: torch.optim.Optimizer, moments: Moments) -> None:
        """Let the optimizer go on from what another kept, whole, under any engine and in any number of processes."""
