"""The optimal token baseline: one for each position, from the energy of the gradients up to it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlstab import Mean, Settled, State
from rlstab.stages.opob_proxy import logit_squares
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


class OptimalTokenBaseline(AdvantageEstimator):
    """Subtract at each position a separate mean reward, weighted by the energy of the gradients up to there (OTB).

    Problem:
        In long responses the variance of the gradient explodes. The mean reward of the group is the same baseline for
        all responses and all tokens, though some responses have made large gradients by a position and others hardly
        any. The baseline of least variance weighs each response by its squared gradient, and each token can have its
        own baseline. The gradient over all weights is costly; that of the log-prob by the logits follows from the
        forward pass alone.

    Equation:
        Of the responses j of a group that have a token at position t, with R_j = ``rewards`` and
        p_jt = exp(``logprobs``):

            w_jt  = 1 - 2 p_jt + sum_v pi_jtv^2          squared norm of the gradient of log p_jt by the logits
            W_jt  = sum_{u <= t} w_ju
            b_t   = sum_j W_jt R_j / sum_j W_jt          the plain mean where all W_jt are 0
            A_it  = R_i - b_t
            A_it  = 0                                    where all R_j of the group are equal

        sum_v pi_v^2 is ``sum_p_sq``. Where only one response goes on, b_t is its own reward; with ``zero_tail`` b_t is
        0 there.

    Reads:
        - ``rewards`` (S,): as the reward shapers left them.
        - ``logprobs`` (S, T), nats: the policy that learns.
        - ``sum_p_sq`` (S, T): sum of the squared probabilities of the vocabulary, of the policy that learns.
        - ``lengths`` (S,): the number of tokens.
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S, T) advantages. They do not sum to 0 over a group.

    Parameters:
        - ``zero_tail``: bool, default True. Whether the longest response keeps its reward as the advantage of the
          tokens after the end of the second longest; False gives them 0. verl's ``handle_zero_tail`` and its default.

    State:
        none

    Deviations:
        - From the paper: the reward comes at the end of a response, so that the return of all its tokens is R. Its
          variant for several turns, with rewards between them, is not offered.
        - From verl: it adds 1e-8 to the sum of the W_jt, so that its baseline is 0 where all of them are; here it is
          the plain mean.
        - From verl: a lone response and the tail of a group of equal rewards keep their reward; here both are 0.
        - From verl: with importance sampling on, it multiplies w_jt by the squared weight of the token to the sampler.
          That is not offered; ``opob_proxy`` weighs whole responses in this way.

    Interacts:
        - ``opob_proxy``: the same squared norms, summed over the whole response and with importance weights.
        - ``gspo`` and other ratios of whole responses assume one advantage per response.

    Limits:
        - ``dr_grpo`` where the W_jt are equal over the group at every position.
        - A group of one response, or of equal rewards, has the advantage 0.

    Example:
        Two answers, of two tokens and of one. At the first w = 1 - 1 + 0.5 = 0.5 and 1 - 0.5 + 0.25 = 0.75, so that
        b = 0.5 / 1.25 = 0.4. At the second the first answer goes on alone.

        >>> import torch
        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> drawn = torch.tensor([[0.5, 0.5], [0.25, 1.0]], dtype=torch.float64)
        >>> evidence = {"logprobs": drawn.log(), "sum_p_sq": drawn}
        >>> batch = ResponseBatch.of([1.0, 0.0], lengths=[2.0, 1.0], extra=evidence)
        >>> for row in OptimalTokenBaseline().advantages(batch, Settled(), {}).tolist():
        ...     print([round(value, 4) for value in row])
        [0.6, 1.0]
        [-0.4, 0.0]

    Source:
        Y. Li et al., "The Optimal Token Baseline: Variance Reduction for Long-Horizon LLM-RL", 2026, arXiv 2602.07078.
        Common code: verl-project/verl ``verl/trainer/ppo/core_algos.py``
        (``compute_optimal_token_baseline_advantage``).
    """

    name = "optimal_token_baseline"
    compares = True
    per = "token"
    needs = {"logprobs", "sum_p_sq"}

    zero_tail: bool = True

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        mask, baseline, _ = self._baseline(responses)
        return torch.where(mask & ~responses.even.unsqueeze(-1), responses.rewards.unsqueeze(-1) - baseline, 0.0)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        """How far the baseline lies above the mean of the group, and the share of tokens of the only response left.

        Over tokens of groups whose rewards differ; the baseline where there are several.
        """
        mask, baseline, lone = self._baseline(responses)
        mask = mask & ~responses.even.unsqueeze(-1)
        shift = baseline - responses.group_mean(responses.rewards).unsqueeze(-1)
        return {"baseline_shift": Mean.of(shift, mask & ~lone), "alone": Mean.of(lone, mask)}

    def _baseline(self, responses: ResponseBatch) -> tuple[Tensor, Tensor, Tensor]:
        """``(S, T)``: whether there is a token, its baseline, and whether it is the only one of its group there."""
        squares = logit_squares(responses.evidence("logprobs"), responses.evidence("sum_p_sq"))
        mask = torch.arange(squares.shape[-1]) < responses.lengths.unsqueeze(-1)

        def over_group(values: Tensor) -> Tensor:
            return responses.group_sum(torch.where(mask, values, 0.0))

        energy, ones = torch.where(mask, squares, 0.0).cumsum(-1), torch.ones_like(squares)
        lone = over_group(ones) == 1
        weight = torch.where(over_group(energy) == 0, ones, energy)
        baseline = over_group(weight * responses.rewards.unsqueeze(-1)) / over_group(weight)
        baseline = torch.where(lone, 0.0 if self.zero_tail else responses.rewards.unsqueeze(-1), baseline)
        return mask, baseline, lone
