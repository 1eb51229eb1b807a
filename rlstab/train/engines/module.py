"""The policy as one module whose forward does everything, which is what torch's engines wrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from rlstab.signals import TokenSignals
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy


class PolicyModule(nn.Module):
    """Hidden states and the pass over the vocabulary in one forward.

    An engine makes weights whole on the way into the forward of the module that it wraps, and no longer. The head
    may be tied to the embeddings, so that it has to be read inside of the same forward.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = (policy,)  # in a tuple: it is no module, and nothing must look for one in it

    def forward(self, sequences: tuple[Tensor, ...], index: Tensor, asked: Mapping[str, Any]) -> dict[str, Tensor]:
        """Signals that were asked for, by name: engines look for tensors in tuples and dictionaries alone."""
        found = self._policy[0].signals(Sequences(*sequences), index, **asked)
        named = {one.name: getattr(found, one.name) for one in fields(found)}
        return {name: values for name, values in named.items() if values is not None}


def signals_by(
    wrapped: Callable[..., Any], sequences: Sequences, index: Tensor, asked: Mapping[str, Any]
) -> TokenSignals:
    """What a :class:`PolicyModule` finds, inside of what an engine wrapped around it."""
    given = tuple(getattr(sequences, one.name) for one in fields(sequences))
    return TokenSignals(**wrapped(given, index, dict(asked)))


def nothing(policy: Policy, wrapped: Callable[..., Any]) -> Tensor:
    """A loss of 0 that reaches every weight, by one token: what a process without work adds so that none waits."""
    token = torch.full((1, 1), policy.pad_id, device=policy.device)
    there = torch.ones_like(token, dtype=torch.bool)
    one, index = Sequences(token, there, token, there), torch.zeros(1, dtype=torch.int64, device=policy.device)
    asked = {"temperature": 1.0, "needs": {"logprobs"}, "options": {}, "rows": None}
    logprobs = signals_by(wrapped, one, index, asked).logprobs
    assert logprobs is not None
    return 0.0 * logprobs.sum()
