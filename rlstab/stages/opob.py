"""OPOB: the off-policy optimal baseline of VCPO, from measured gradient norms."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlstab import About, Mean, Settled, State
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


class OPOB(AdvantageEstimator):
    """Subtract the minimum-variance baseline, from importance weights and measured gradient norms (VCPO).

    Problem:
        With a stale sampler, a few responses carry most of the importance weight, and some responses have far larger
        gradients than others. A plain mean of the rewards weighs all equally; the gradient then swings with the few
        that dominate. A baseline does not change the mean of the gradient, so it can be chosen to minimise the
        variance: the mean reward, with each response weighted by its contribution to the squared gradient.

    Equation:
        Of a group with rewards R_i = ``rewards``:

            w_i  = exp sum_t (logprobs_it - rollout_logprobs_it)
            n_i  = || grad sum_t log pi(y_it) ||,   n_i^2 = ``squared_gradient``
            b    = sum_j w_j^2 n_j^2 R_j / sum_j w_j^2 n_j^2
            A_i  = (R_i - b) / s               s: the standard deviation of the group over n
            A_i  = 0                           where all R_j are equal

        Without ``norm_by_std`` s is 1. w is not clipped, and the largest factor is divided out before the exponential.

    Reads:
        - ``rewards`` (S,): as the reward shapers left them.
        - ``logprobs`` (S, T), nats: the policy that learns.
        - ``rollout_logprobs`` (S, T), nats: as the sampler reported them.
        - ``squared_gradient`` (S,): over all trainable weights, by one backward for each response.
        - ``lengths`` (S,): the number of tokens.
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S,) advantages, which every token of the response gets. They do not sum to 0 over a group.

    Parameters:
        - ``norm_by_std``: bool, default True. Whether to divide by the standard deviation of the group. The authors'
          scripts.

    State:
        none

    Deviations:
        - From its code: it multiplies w^2 by the squared norm of a gradient that carries the truncated w already, so
          that w enters four times. Here it enters twice, as in the paper.
        - From its code: the norm is measured in the backward of the optimizer step, one response at a time, and the
          advantage is applied to two summed gradients afterwards. Here norms are measured before, by separate backward
          passes, and the optimizer step is as with any other advantage.
        - From its code: a baseline over a whole mini-batch, medians, and weights clipped or normalised by length, all
          off in its scripts, are not offered.
        - From the paper: its other half, a learning rate by the effective sample size, is the method ``ess_scale``.

    Interacts:
        - ``importance_correction``: the gradient has to carry the weight w that the baseline assumes; it was published
          with level 'sequence' and weights truncated at 8.
        - ``sequence_mean``: divides the gradient of a response by its length, which the norms here do not know. The
          baseline is that of least variance under a sum over tokens: ``constant_length``.
        - ``opob_proxy``: the same idea without extra backward passes, but not the same baseline.
        - ``opo``: length in place of the norm, and w = 1.

    Limits:
        - ``grpo`` with ``ddof=0``, but for its epsilon, where all w_i n_i of a group are equal.
        - A group of one response, or of equal rewards, has the advantage 0.
        - Cost: a forward and a backward pass for each response, one at a time. On the countdown model, for 16 prompts
          with 8 answers each, that is 14 optimizer steps, or 6 where only groups whose rewards differ are measured, as
          in the trainer, and the optimizer step covers only these too (measured with rlstab 0.1.0). Larger models fill
          the processor with one response, so there it should be fewer; that was not measured.
        - Gain: there, with a sampler four optimizer steps old, the variance of the gradient of a group is 0.51 times
          that under ``dr_grpo`` (95 % interval 0.39 to 0.67, five seeds), and 0.47 times (0.33 to 0.66) at gradients of
          equal length along the unbiased one. On-policy it is 0.46 times (0.35 to 0.61): the norms are responsible, not
          the importance weights. Whether this improves the policy was not measured.

    Example:
        Three answers, the first right and with twice the gradient norm of the others: b = 4 / (4 + 1 + 1) = 2 / 3.

        >>> import torch
        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> logprobs = torch.tensor([[-1.0, -2.0]] * 3)
        >>> evidence = {
        ...     "logprobs": logprobs,
        ...     "rollout_logprobs": logprobs,
        ...     "squared_gradient": torch.tensor([4.0, 1.0, 1.0]),
        ... }
        >>> batch = ResponseBatch.of([1.0, 0.0, 0.0], lengths=2.0, extra=evidence)
        >>> [round(value, 4) for value in OPOB(norm_by_std=False).advantages(batch, Settled(), {}).tolist()]
        [0.3333, -0.6667, -0.6667]

    Source:
        L. J. Huang et al., "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", 2026, arXiv 2602.17616.
        Reference code: mit-han-lab/vcpo ``verl/workers/actor/megatron_actor.py``, ``verl/workers/utils/vcpo.py``.
    """

    name = "opob"
    compares = True
    needs = {"squared_gradient", "logprobs", "rollout_logprobs"}
    about = About(
        addresses={"off-policy"},
        expects={
            "importance_correction": "the baseline is that of a gradient in which every response has its importance "
            "weight."
        },
    )

    norm_by_std: bool = True

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        advantages = responses.rewards - optimal_baseline(responses, self._log_weights(responses))
        if self.norm_by_std:
            deviation = responses.rewards - responses.group_mean(responses.rewards)
            spread = responses.group_mean(deviation.square()).sqrt()
            advantages = advantages / torch.where(responses.even, 1.0, spread)
        return torch.where(responses.even, 0.0, advantages)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        """How far the baseline lies above the mean of the group; the number of responses that make it, as a share.

        The share is the effective sample size of the weights. Over responses of groups whose rewards differ.
        """
        log_weights, where = self._log_weights(responses), ~responses.even
        weights = _shares(responses, log_weights)
        shift = optimal_baseline(responses, log_weights) - responses.group_mean(responses.rewards)
        size = responses.group_sum(torch.ones_like(weights))
        share = responses.group_sum(weights).square() / (size * responses.group_sum(weights.square()))
        return {"baseline_shift": Mean.of(shift, where), "effective_share": Mean.of(share, where & ~share.isnan())}

    def _log_weights(self, responses: ResponseBatch) -> Tensor:
        """``(S,)`` log of the squared importance weight times the squared norm of the gradient."""
        return 2 * log_ratios(responses) + responses.evidence("squared_gradient").double().log()


def over_tokens(responses: ResponseBatch, values: Tensor) -> Tensor:
    """``(S,)`` sum of ``(S, T)`` values over the tokens of each response; values after its end are not read."""
    mask = torch.arange(values.shape[-1]) < responses.lengths.unsqueeze(-1)
    return torch.where(mask, values, 0.0).sum(-1)


def log_ratios(responses: ResponseBatch) -> Tensor:
    """``(S,)`` float64, nats: log of the ratio of a response's probability now to that when it was sampled."""
    learner, sampler = responses.evidence("logprobs"), responses.evidence("rollout_logprobs")
    return over_tokens(responses, learner.double() - sampler.double())


def optimal_baseline(responses: ResponseBatch, log_weights: Tensor) -> Tensor:
    """``(S,)`` mean reward of the group of each response, weighted by the exponential of ``(S,)`` log weights.

    The gradient of a group is the sum of w_i (R_i - b) g_i, with w_i the importance weight of a response and g_i the
    gradient of its log-prob. For a b that does not depend on these responses its variance is least at
    b = sum w_i^2 n_i^2 R_i / sum w_i^2 n_i^2, where n_i is the norm of g_i (arXiv 2602.17616).

    The plain mean if all weights of a group are 0. A common factor of a group's weights changes nothing, so the largest
    is divided out before the exponential, and none overflows.
    """
    weights = _shares(responses, log_weights)
    weightless = responses.group_sum(weights) == 0
    return responses.group_mean(responses.rewards, torch.where(weightless, 1.0, weights))


def _shares(responses: ResponseBatch, log_weights: Tensor) -> Tensor:
    """``(S,)`` weights over the largest of the group."""
    start = torch.full((responses.groups,), -torch.inf, dtype=torch.float64)
    largest = start.scatter_reduce(0, responses.group, log_weights, "amax")
    return (log_weights - largest.nan_to_num(neginf=0.0)[responses.group]).exp()
