"""The optimal reward baseline of OPO, with length for the squared gradient norm."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlstab import About, Mean, Settled, State
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


class OPO(AdvantageEstimator):
    """Subtract a length-weighted mean reward of the group, in which long responses count more.

    Problem:
        The baseline of a policy gradient does not change its mean, but does change its variance. The variance is least
        if the baseline weighs each reward by the squared norm of the gradient of its response, not if it weighs all
        equally. That norm is costly to measure. If token gradients are roughly orthogonal and of equal norm, its square
        grows with the number of tokens, so OPO weighs by length.

    Equation:
        Of a group with rewards R_i = ``rewards`` and lengths L_i = ``lengths``:

            b    = sum_j L_j R_j / sum_j L_j
            A_i  = R_i - b
            A_i  = 0                            where all R_j are equal

    Reads:
        - ``rewards`` (S,): as the reward shapers left them.
        - ``lengths`` (S,), tokens: what was sampled, the end included.
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S,) advantages, which every token of the response gets. They do not sum to 0 over a group.

    Parameters:
        none

    State:
        none

    Deviations:
        - From the paper: none in the baseline. It asks for exact on-policy training, one optimizer step per rollout,
          which is a setting of the run.
        - From verl: the advantage of a lone answer is its reward; here it is 0.

    Interacts:
        - ``sequence_mean``: divides the gradient of a response by its length, so that its squared norm falls with the
          length, and the weights that this baseline assumes are no longer optimal. The paper takes sums over tokens:
          ``token_mean`` or ``constant_length``.
        - ``opob``: the same with measured norms, and for responses of an older policy.

    Limits:
        - ``dr_grpo`` where the responses of a group are equally long.
        - A group of one response, or of equal rewards, has the advantage 0.

    Example:
        Two right answers of 10 and 40 tokens among five: b = (10 + 40) / 200 = 1 / 4, where the plain mean is 2 / 5.

        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> batch = ResponseBatch.of([1.0, 0.0, 0.0, 1.0, 0.0], lengths=[10.0, 20.0, 30.0, 40.0, 100.0])
        >>> OPO().advantages(batch, Settled(), {}).tolist()
        [0.75, -0.25, -0.25, 0.75, -0.25]

    Source:
        Y. Hao, L. Dong, X. Wu et al., "On-Policy RL with Optimal Reward Baseline", 2025, arXiv 2505.23585. Common code:
        verl-project/verl ``verl/trainer/ppo/core_algos.py`` (``compute_opo_outcome_advantage``).
    """

    name = "opo"
    compares = True
    about = About(addresses={"length"})

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        baseline = responses.group_mean(responses.rewards, responses.lengths)
        idle = responses.even | baseline.isnan()  # a group without a token has nothing to learn
        return torch.where(idle, 0.0, responses.rewards - baseline)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        """How far the baseline lies above the mean of the group, over responses of groups that differ."""
        mean = responses.group_mean(responses.rewards)
        shift = responses.group_mean(responses.rewards, responses.lengths) - mean
        return {"baseline_shift": Mean.of(shift, ~responses.even & ~shift.isnan())}
