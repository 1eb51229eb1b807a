"""The baseline of least variance for responses of another policy, and the advantage from it.

The gradient of a group is the sum of w_i (R_i - b) g_i, with w_i the importance weight of a response and g_i the
gradient of its log-prob. For a b that does not depend on these responses its variance is least at
b = sum w_i^2 n_i^2 R_i / sum w_i^2 n_i^2, where n_i is the norm of g_i (arXiv 2602.17616).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlstab.core.stats import Mean
from rlstab.stages.response_batch import ResponseBatch

#: Standard deviations of a group from here on are divided by, as in the code of arXiv 2602.17616.
SPREAD = 1e-8


def over_tokens(responses: ResponseBatch, values: Tensor) -> Tensor:
    """``(S,)`` sum of ``(S, T)`` values over the tokens of each response; what stands after its end does not matter."""
    there = torch.arange(values.shape[-1]) < responses.lengths.unsqueeze(-1)
    return torch.where(there, values, 0.0).sum(-1)


def log_ratios(responses: ResponseBatch) -> Tensor:
    """``(S,)`` float64, nats: log of how much likelier a response is now than where it was sampled."""
    now, then = responses.evidence("logprobs"), responses.evidence("rollout_logprobs")
    return over_tokens(responses, now.double() - then.double())


def optimal_baseline(responses: ResponseBatch, log_weights: Tensor) -> Tensor:
    """``(S,)`` mean reward of the group of each response, weighed by the exponential of ``(S,)`` log weights.

    Plain where all weights of a group are 0. A common factor of the weights of a group changes nothing, so the largest
    is divided out before the exponential, and none overflows.
    """
    weights = _shares(responses, log_weights)
    none = responses.group_sum(weights) == 0
    return responses.group_mean(responses.rewards, torch.where(none, 1.0, weights))


def less_baseline(responses: ResponseBatch, log_weights: Tensor, *, norm_by_std: bool) -> Tensor:
    """``(S,)`` reward less the optimal baseline, divided by the standard deviation of the group (over n) if asked."""
    advantages = responses.rewards - optimal_baseline(responses, log_weights)
    if norm_by_std:
        deviation = responses.rewards - responses.group_mean(responses.rewards)
        spread = responses.group_mean(deviation.square()).sqrt()
        advantages = advantages / torch.where(spread > SPREAD, spread, 1.0)
    return torch.where(responses.even, 0.0, advantages)


def baseline_report(responses: ResponseBatch, log_weights: Tensor) -> Mapping[str, Mean]:
    """How far the baseline lies above the mean of the group, and how many responses make it, as a share of the group.

    The share is the effective sample size of the weights. Over responses of groups whose rewards differ.
    """
    weights, where = _shares(responses, log_weights), ~responses.even
    shift = optimal_baseline(responses, log_weights) - responses.group_mean(responses.rewards)
    size = responses.group_sum(torch.ones_like(weights))
    share = responses.group_sum(weights).square() / (size * responses.group_sum(weights.square()))
    return {"baseline_shift": Mean.of(shift, where), "effective_share": Mean.of(share, where & ~share.isnan())}


def _shares(responses: ResponseBatch, log_weights: Tensor) -> Tensor:
    """``(S,)`` weights over the largest of the group."""
    start = torch.full((responses.groups,), -torch.inf, dtype=torch.float64)
    largest = start.scatter_reduce(0, responses.group, log_weights, "amax")
    return (log_weights - largest.nan_to_num(neginf=0.0)[responses.group]).exp()
