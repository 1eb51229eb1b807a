"""The reference policy: it does not learn, and says how likely it finds what the other one sampled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy
from rlstab.train.step import forward_signals


@dataclass(frozen=True)
class Reference:
    """Makes the evidence ``ref_logprobs``.

    Attributes:
        whole: enters the policy with all of its weights; an adapter on it is off for as long as it is asked.
        temperature: of the log-probs.
        micro_batch_size: responses in one forward.
    """

    whole: Callable[[], AbstractContextManager[Policy]]
    temperature: float
    micro_batch_size: int

    def __call__(self, sequences: Sequences) -> Tensor:
        """``(R, T)`` float32 log-probs, 0 where there is no token; every process asks."""
        found = torch.zeros(sequences.response_ids.shape, device=sequences.response_ids.device)
        with self.whole() as policy, policy.without_adapter():
            for rows in torch.arange(len(found)).split(self.micro_batch_size):
                if len(rows):
                    values = forward_signals(policy, sequences, rows, self.temperature, {"logprobs"}, {})["logprobs"]
                    found[rows, : values.shape[1]] = values
        return found
