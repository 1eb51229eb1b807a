"""The off-policy optimal baseline, with a proxy of the gradient norm that needs no backward pass."""

from torch import Tensor

from rlstab.stages.opob import OPOB, log_ratios, over_tokens
from rlstab.stages.response_batch import ResponseBatch


class OPOBProxy(OPOB):
    """Subtract the baseline of ``opob``, with the gradient of the logits in place of that of all weights.

    Problem:
        ``opob`` needs the norm of the gradient of each response over all weights, and therefore a backward pass for
        each. The norm of the gradient of a log-prob with respect to the logits is known from the forward pass: it
        depends on p_t and the sum of the squared probabilities. Summed over tokens, it stands in for the full norm.
        This is not the published method.

    Equation:
        As ``opob``, with

            n_i^2  =  sum_t (1 - 2 p_it + sum_v pi_itv^2),   p_it = exp(logprobs_it)

        the squared norm of the gradient of log p_t with respect to the logits of token t, over the tokens of the
        response. sum_v pi_v^2 is ``sum_p_sq``.

    Reads:
        - ``rewards`` (S,): as the reward shapers left them.
        - ``logprobs`` (S, T), nats: the policy that learns.
        - ``rollout_logprobs`` (S, T), nats: as the sampler reported them.
        - ``sum_p_sq`` (S, T): sum of the squared probabilities of the vocabulary, of the policy
          that learns.
        - ``lengths`` (S,): the number of tokens.
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S,) advantages, which every token of the response gets. They do not sum to 0 over a group.

    Parameters:
        - ``norm_by_std``: bool, default True. Whether to divide by the standard deviation of the group. As ``opob``.

    State:
        none

    Deviations:
        - From the paper: it takes the norm of the gradient over all weights. On the countdown model, after 20
          optimizer steps, the logarithms of the two correlate by 0.74, and ranks among the answers to a prompt by 0.79
          (means over five seeds, measured with rlstab 0.1.0). The variance of the gradient of a group is 0.65 times
          that under ``dr_grpo`` (95 % interval 0.53 to 0.79), where ``opob`` has 0.51.
        - From verl: its optimal baseline with this norm is one per position, from sums up to each token; here it is one
          per response, as in the paper.

    Interacts:
        - As ``opob``: ``importance_correction`` carries the weights in the loss.
        - ``opo``: this is the same if all tokens have the same gradient norm and nothing is stale.

    Limits:
        - ``grpo`` with ``ddof=0``, but for its epsilon, where all w_i n_i of a group are equal.
        - A group of one response, or of equal rewards, has the advantage 0.

    Example:
        Two answers of one token, drawn with p = 0.5 of two equal tokens (1 - 1 + 0.5 = 0.5) and with p = 0.25 of four
        (1 - 0.5 + 0.25 = 0.75): b = 0.5 / (0.5 + 0.75) = 0.4.

        >>> import torch
        >>> from rlstab.core.stats import Settled
        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> drawn = torch.tensor([[0.5], [0.25]], dtype=torch.float64)
        >>> evidence = {"logprobs": drawn.log(), "rollout_logprobs": drawn.log(), "sum_p_sq": drawn}
        >>> batch = ResponseBatch.of([1.0, 0.0], extra=evidence)
        >>> [round(value, 4) for value in OPOBProxy(norm_by_std=False).advantages(batch, Settled(), {}).tolist()]
        [0.6, -0.4]

    Source:
        The baseline: L. J. Huang et al., "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", 2026,
        arXiv 2602.17616. The stand-in: verl-project/verl ``verl/trainer/ppo/core_algos.py`` (its optimal token
        baseline).
    """

    name = "opob_proxy"
    needs = {"sum_p_sq", "logprobs", "rollout_logprobs"}

    def _log_weights(self, responses: ResponseBatch) -> Tensor:
        squares = logit_squares(responses.evidence("logprobs"), responses.evidence("sum_p_sq"))
        return 2 * log_ratios(responses) + over_tokens(responses, squares).log()


def logit_squares(logprobs: Tensor, sum_p_sq: Tensor) -> Tensor:
    """Squared norm of the gradient of each log-prob by the logits, in float64; both of one shape."""
    # for a certain token it is 0 up to rounding
    return (1 - 2 * logprobs.double().exp() + sum_p_sq.double()).clamp(min=0)
