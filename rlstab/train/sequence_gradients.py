"""How large the gradient of each response is: what an optimal baseline weighs responses by."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy


def squared_gradients(policy: Policy, sequences: Sequences, temperature: float, where: Tensor | None = None) -> Tensor:
    """Squared norm of the gradient of each response's log-prob, summed over its tokens, by all trainable weights.

    One forward and backward for each response, for the sum of gradients that one over several gives has lost the norms
    of its terms. Forwards over several rows would not help: each backward still runs through all of them. ``.grad`` is
    left as it is. Weights have to be whole on this device, not sharded.

    Args:
        policy: whose weights are meant; those that do not require a gradient do not count.
        sequences: ``S`` prompts and responses.
        temperature: of the log-probs.
        where: ``(S,)`` bool, the responses to measure; None for all. Those of groups with equal rewards have the
            advantage 0 under any baseline, so that there is no need to.

    Returns:
        ``(S,)`` float64, on the CPU; 0 for a response without tokens, and for one that is not measured.
    """
    weights = [one for one in policy.model.parameters() if one.requires_grad]
    found = torch.zeros(len(sequences.response_ids), dtype=torch.float64)
    for row in range(len(found)) if where is None else where.nonzero().squeeze(-1).tolist():
        one = sequences.rows(torch.tensor([row], device=sequences.response_ids.device))
        index = one.response_mask.reshape(-1).nonzero().squeeze(-1)
        if not weights or not len(index):
            continue
        with torch.enable_grad():
            logprobs = policy.signals(one, index, temperature=temperature, needs={"logprobs"}, options={}).logprobs
            assert logprobs is not None
            gradients = torch.autograd.grad(logprobs.sum(), weights, allow_unused=True)
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients if each is not None]
        found[row] = torch.stack(norms).square().sum().cpu()
    return found
