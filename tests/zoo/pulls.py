"""The factor on the gradient of each log-prob, ``c`` in ``-sum c grad log-prob``, from the loss by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlstab import PolicyOutputs, TokenBatch, TokenObjective, compose, make_plan


def pulls(*methods: TokenObjective, ratios: Any, advantages: Any, old: Any = -1.0, **evidence: Any) -> Tensor:
    """``(B, T)`` float64 factors, times the number of tokens, at ``(B, T)`` live ratios.

    ``old`` and the evidence are ``(B, T)`` or one number, advantages ``(B,)`` or ``(B, T)``.
    """
    ratios = torch.tensor(ratios, dtype=torch.float64)

    def lay(values: Any) -> Tensor:
        values = torch.as_tensor(values, dtype=torch.float64)
        return values.expand(ratios.shape) if not values.ndim else values

    old = lay(old)
    groups = evidence.pop("group_ids", None)
    batch = TokenBatch.from_padded(
        response_mask=torch.ones_like(ratios),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        old_logprobs=old,
        group_ids=None if groups is None else torch.tensor(groups),
        **{name: lay(values) for name, values in evidence.items()},
    )
    live = (old + ratios.log()).requires_grad_()
    make_plan(compose(*methods), [batch]).loss(0, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
    assert live.grad is not None
    return -live.grad * len(batch)
