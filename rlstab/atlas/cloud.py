"""The optimizer step on which every method is drawn: a fixed cloud of tokens with the statistics of a real one.

At each place the likeliest token has what is not left to the others, and the 999 others share it as a Zipf distribution
of their own, so that probability, entropy and all signals belong together. Half of the entropies are below about 0.01
nats and a fifth above 0.67, as counted in arXiv 2506.01939. Some tokens are drawn from the tail, far more than in
practice: what happens to rare tokens has to be seen.
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.random import uniform

#: Responses per prompt, and the limit of their length in tokens: a response of that length was cut off.
GROUP, LIMIT = 4, 64
#: How many responses of each prompt are right.
RIGHT = (1, 2, 3, 2, 1, 3, 2, 2)
#: Tokens of the vocabulary; the share that is drawn from the tail, evenly over log-probs down to that of the rarest.
VOCABULARY, RARE, RAREST = 1000, 0.15, 1e-5
#: Quantiles of what the likeliest token leaves to the others: share of the places, probability.
LEFT = ((0.0, 1e-5), (0.5, 1.2e-3), (0.8, 0.2), (1.0, 0.5))
#: Exponents of the Zipf distributions of the others, from the flattest to the steepest.
EXPONENTS = (1.0, 3.5)
#: Standard deviations of log-ratios on a rare token: what the policy moved since the rollout, and what the sampler
#: reported otherwise. On a token of probability p they are (1 - p) times as large, and a hundredth more.
DRIFT, MISMATCH = 0.25, 0.6
#: Share of the largest probability below which a min-p filter removes a token, where no method says otherwise.
MIN_P = 0.02


@functools.cache
def cloud(min_p: float = MIN_P) -> TokenBatch:
    """The step, in float64; what it says is a pure function of its numbers, the same on every machine."""
    right = torch.tensor([[one < count for one in range(GROUP)] for count in RIGHT]).double()
    deviation = right.std(1, correction=0, keepdim=True)
    advantages = ((right - right.mean(1, keepdim=True)) / deviation).reshape(-1)
    rows = advantages.numel()
    number = torch.arange(rows)
    lengths = (16 + 72 * uniform(1, number).square()).clamp(max=LIMIT).long()
    sequence = torch.repeat_interleave(number, lengths)
    position = torch.cat([torch.arange(int(length)) for length in lengths])

    def drawn(stream: int) -> Tensor:
        return uniform(stream, sequence, position)

    def noise(stream: int, scale: float) -> Tensor:
        """Normal numbers, by way of Python: vectorised functions differ in the last bit between processors."""
        normal = torch.tensor([NormalDist().inv_cdf(max(one, 1e-9)) for one in drawn(stream).tolist()])
        return scale * (1.01 - logprobs.exp()) * normal.double()

    logits = _distributions(drawn(2), drawn(9))
    cumulative = logits.exp().cumsum(1)
    token = torch.searchsorted(cumulative, drawn(3).unsqueeze(1)).squeeze(1).clamp(max=VOCABULARY - 1)
    wanted = math.log(RAREST) * drawn(5)
    rare = (logits >= wanted.unsqueeze(1)).sum(1) - 1
    token = torch.where(drawn(4) < RARE, rare.clamp(min=0), token)
    logprobs = logits.gather(1, token.unsqueeze(1)).squeeze(1)
    old = (logprobs - noise(6, DRIFT)).clamp(max=-1e-6)
    kept = logits >= logits[:, :1] + math.log(min_p)
    return TokenBatch(
        old_logprobs=old,
        logprobs=logprobs,
        advantages=advantages[sequence],
        sequence=sequence,
        position=position,
        sequence_ids=number,
        group_ids=number // GROUP,
        entropies=-(logits.exp() * logits).sum(1),
        ref_logprobs=(logprobs - noise(7, DRIFT)).clamp(max=-1e-6),
        rollout_logprobs=(old - noise(8, MISMATCH)).clamp(max=-1e-6),
        max_logprobs=logits[:, 0],
        log_kept_mass=torch.where(kept, logits, -torch.inf).logsumexp(1),
        sum_p_sq=(2 * logits).exp().sum(1),
        truncated=(lengths == LIMIT).double()[sequence],
        branch=(number // GROUP % 4 == 3).double()[sequence],
        block_ids=_blocks(position.double(), lengths[sequence].double()),
    )


def live(batch: TokenBatch) -> PolicyOutputs:
    """The policy at the start of the step, as what is differentiated."""
    assert batch.entropies is not None
    assert batch.log_kept_mass is not None
    return PolicyOutputs(
        *(one.clone().requires_grad_() for one in (batch.logprobs, batch.entropies, batch.log_kept_mass))
    )


def _distributions(share: Tensor, steep: Tensor) -> Tensor:
    """``(n, V)`` log-probs, the largest first, by two uniform numbers for each place."""
    quantile = torch.tensor([one for one, _ in LEFT], dtype=torch.float64)
    left = _between(share, quantile, torch.tensor([math.log(one) for _, one in LEFT], dtype=torch.float64))
    ranks = torch.arange(1, VOCABULARY, dtype=torch.float64).log()
    exponent = EXPONENTS[0] + (EXPONENTS[1] - EXPONENTS[0]) * steep
    others = torch.log_softmax(-exponent.unsqueeze(1) * ranks, 1) + left.unsqueeze(1)
    logits = torch.cat([(-left.exp()).log1p().unsqueeze(1), others], 1)
    return logits.sort(dim=1, descending=True, stable=True).values


def _blocks(position: Tensor, length: Tensor) -> Tensor:
    """Four tokens of no block, a block of a third of what is left, and one of the rest."""
    second = (position >= 4 + (length - 4) / 3).double()
    return torch.where(position < 4, -1.0, second)


def _between(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Linear interpolation of ascending ``x``."""
    place = torch.searchsorted(x, values).clamp(min=1, max=x.numel() - 1)
    part = (values - x[place - 1]) / (x[place] - x[place - 1])
    return y[place - 1] + part * (y[place] - y[place - 1])
